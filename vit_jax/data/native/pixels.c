/* Pixels in and out. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "resize.h"

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

/* Bytes of at most eight lines, `apart` from each other, to floats: lane y of columns[i] is byte i of line y. There is
   room for a multiple of eight. */
FAST static void take_lines(const uint8_t *bytes, size_t apart, int lines, int length, Lanes *columns) {
  float level[LANES][AT_ONCE] __attribute__((aligned(sizeof(Lanes)))) = {0};
  for (int from = 0; from < length; from += AT_ONCE) {
    int n = length - from < AT_ONCE ? length - from : AT_ONCE;
    for (int y = 0; y < lines; y++)
      for (int x = 0; x < n; x++) level[y][x] = bytes[y * apart + from + x];
    for (int x = 0; x < n; x += LANES) {
      Lanes block[LANES];
      for (int y = 0; y < LANES; y++) block[y] = *(const Lanes *)&level[y][x];
      transpose(block);
      for (int y = 0; y < LANES; y++) columns[from + x + y] = block[y];
    }
  }
}

int cut_pixels(const uint8_t *pixels, int rows, int columns, int channels, const double part[4], int inside,
               int cubic, uint8_t *out, int height, int size) {
  Plane plane[MOST_CHANNELS] = {0}, *first = plane;
  float *row[MOST_CHANNELS] = {0};
  Lanes *strip = NULL; /* of pixels, their channels side by side */
  if (!(part[0] >= 0 && part[1] >= 0 && part[2] <= rows && part[3] <= columns)) return UNSUITABLE;
  int top = inside ? (int)floor(part[0]) : 0, bottom = inside ? (int)ceil(part[2]) : rows;
  int left = inside ? (int)floor(part[1]) : 0, right = inside ? (int)ceil(part[3]) : columns;
  int status = make_filter(&first->down, part[0], part[2], top, bottom, height, cubic);
  if (status == DONE) status = make_filter(&first->over, part[1], part[3], left, right, size, cubic);
  int from = first->over.from, length = (first->over.to - from) * channels;
  void *memory;
  if (status == DONE) {
    status = posix_memalign(&memory, sizeof(Lanes), (size_t)(length + LANES) * sizeof(Lanes)) ? NO_MEMORY : DONE;
    if (status == DONE) strip = memory;
  }
  for (int i = 0; i < channels && status == DONE; i++) {
    plane[i].down = first->down, plane[i].over = first->over;
    plane[i].rows = first->down.from;
    status = make_ring(plane + i, first->down.most + LANES, size);
    if (posix_memalign(&memory, sizeof(Lanes), plane[i].width * sizeof(float))) status = NO_MEMORY;
    else row[i] = memory;
  }
  for (int y = 0; y < height && status == DONE; y++) {
    while (first->rows < first->down.first[y] + first->down.count[y]) {
      int n = rows - first->rows < LANES ? rows - first->rows : LANES;
      size_t line = (size_t)columns * channels;
      take_lines(pixels + first->rows * line + (size_t)from * channels, line, n, length, strip);
      add_strip(plane, channels, strip, from, n, size);
    }
    for (int i = 0; i < channels; i++) take_row(plane + i, y, row[i]);
    write_rows(out + (size_t)y * size * channels, row, channels, size);
  }
  for (int i = 1; i < channels; i++) plane[i].down = plane[i].over = (Filter){0}; /* the first one's */
  for (int i = 0; i < channels; i++) free_plane(plane + i), free(row[i]);
  free(strip);
  return status;
}
