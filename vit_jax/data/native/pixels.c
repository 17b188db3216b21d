/* Pixels in and out. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "resize.h"

typedef uint8_t Bytes __attribute__((vector_size(16)));

/* Red, green, blue and a fourth byte that does not count, (size, 4), to (size, 3). */
INLINE void drop_fourth(uint8_t *out, const uint8_t *bytes, int size) {
  int x = 0;
  for (; x + 4 < size; x += 4) memcpy(out + 3 * x, bytes + 4 * x, 4), memcpy(out + 3 * x + 3, bytes + 4 * x + 4, 4),
    memcpy(out + 3 * x + 6, bytes + 4 * x + 8, 4), memcpy(out + 3 * x + 9, bytes + 4 * x + 12, 4);
  for (; x < size; x++) memcpy(out + 3 * x, bytes + 4 * x, 3);
}

enum { AT_ONCE = 64 }; /* pixels */

INLINE uint32_t to_byte(float level) {
  level = level < 0 ? 0 : level > 255 ? 255 : level;
  return (uint32_t)(int)(level + 0.5f);
}

FAST void write_rgb(uint8_t *out, float *row[3], int size) {
  uint32_t pixels[AT_ONCE];
  for (int from = 0; from < size; from += AT_ONCE) {
    int n = size - from < AT_ONCE ? size - from : AT_ONCE;
    for (int x = 0; x < n; x++)
      pixels[x] = to_byte(row[0][from + x]) | to_byte(row[1][from + x]) << 8 | to_byte(row[2][from + x]) << 16;
    drop_fourth(out + 3 * from, (const uint8_t *)pixels, n);
  }
}

FAST void write_ycc(uint8_t *out, float *row[3], int size) {
  float *restrict red = row[0], *restrict green = row[1], *restrict blue = row[2];
  for (int x = 0; x < size; x++) { /* JFIF 1.02, §7 */
    float y = red[x], cb = green[x] - 128, cr = blue[x] - 128;
    red[x] = y + 1.402f * cr;
    green[x] = y - 0.344136286f * cb - 0.714136286f * cr;
    blue[x] = y + 1.772f * cb;
  }
  write_rgb(out, row, size);
}

void write_rows(uint8_t *out, float **row, int channels, int size) {
  if (channels == 3) {
    write_rgb(out, row, size);
    return;
  }
  for (int i = 0; i < channels; i++)
    for (int x = 0; x < size; x++) out[x * channels + i] = to_byte(row[i][x]);
}

int cut_pixels(const uint8_t *pixels, int rows, int columns, int channels, const double part[4], int inside,
               int cubic, uint8_t *out, int height, int size) {
  Plane plane[MOST_CHANNELS] = {0};
  float *row[MOST_CHANNELS] = {0};
  Lanes *strip[MOST_CHANNELS] = {0};
  int status = DONE;
  if (!(part[0] >= 0 && part[1] >= 0 && part[2] <= rows && part[3] <= columns)) return UNSUITABLE;
  for (int i = 0; i < channels && status == DONE; i++) {
    Plane *p = plane + i;
    int top = inside ? (int)floor(part[0]) : 0, bottom = inside ? (int)ceil(part[2]) : rows;
    int left = inside ? (int)floor(part[1]) : 0, right = inside ? (int)ceil(part[3]) : columns;
    status = make_filter(&p->down, part[0], part[2], top, bottom, height, cubic);
    if (status == DONE) status = make_filter(&p->over, part[1], part[3], left, right, size, cubic);
    if (status != DONE) break;
    p->rows = p->down.from;
    status = make_ring(p, p->down.most + LANES, size);
    void *memory;
    if (posix_memalign(&memory, sizeof(Lanes), p->width * sizeof(float))) status = NO_MEMORY;
    else row[i] = memory;
    if (posix_memalign(&memory, sizeof(Lanes), (size_t)(p->over.to - p->over.from) * sizeof(Lanes))) status = NO_MEMORY;
    else strip[i] = memory;
  }
  for (int y = 0; y < height && status == DONE; y++) {
    while (plane[0].rows < plane[0].down.first[y] + plane[0].down.count[y]) {
      int top = plane[0].rows, n = rows - top < LANES ? rows - top : LANES, left = plane[0].over.from;
      for (int lane = 0; lane < n; lane++) {
        const uint8_t *from = pixels + ((size_t)(top + lane) * columns + left) * channels;
        for (int x = 0; x < plane[0].over.to - left; x++)
          for (int i = 0; i < channels; i++) ((float *)(strip[i] + x))[lane] = from[channels * x + i];
      }
      for (int i = 0; i < channels; i++) add_strip(plane + i, strip[i], left, n, size);
    }
    for (int i = 0; i < channels; i++) take_row(plane + i, y, row[i]);
    write_rows(out + (size_t)y * size * channels, row, channels, size);
  }
  for (int i = 0; i < channels; i++) free_plane(plane + i), free(row[i]), free(strip[i]);
  return status;
}
