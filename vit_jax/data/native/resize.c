/* See resize.h. */

#include "resize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Pixels of the source for a pixel of the result. What shrinks more than this is left to others: its weights take
   too much room. */
enum { MOST_STRETCH = 64 };

/* Keys' cubic convolution with a = -1/2 (1981), for 0 <= x < 2. */
static double cubic_weight(double x) {
  return x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((2.5 - 0.5 * x) * x - 4) * x + 2;
}

int make_filter(Filter *f, double low, double high, int least, int most, int size, int cubic) {
  double scale = (high - low) / size, stretch = scale > 1 ? scale : 1, reach = cubic ? 2 * stretch : stretch;
  if (!(low < high) || !(stretch <= MOST_STRETCH)) return UNSUITABLE;
  f->stride = 2 * (int)reach + 3; /* an open interval of 2 * reach has no more whole numbers in it */
  f->first = malloc(size * sizeof *f->first);
  f->count = malloc(size * sizeof *f->count);
  f->weight = calloc((size_t)size * f->stride, sizeof *f->weight);
  if (!f->first || !f->count || !f->weight) return NO_MEMORY;
  f->from = most;
  for (int i = 0; i < size; i++) {
    double centre = low + (i + 0.5) * scale - 0.5, sum = 0; /* where pixel j is at j */
    int first = (int)floor(centre - reach) + 1, last = (int)ceil(centre + reach);
    if (first < least) first = least;
    if (last > most) last = most;
    if (last <= first) return UNSUITABLE; /* the part is outside */
    float *weight = f->weight + (size_t)i * f->stride;
    for (int j = first; j < last; j++) {
      double x = fabs(j - centre) / stretch;
      sum += weight[j - first] = cubic ? cubic_weight(x) : 1 - x;
    }
    for (int j = first; j < last; j++) weight[j - first] /= sum;
    f->first[i] = first;
    f->count[i] = last - first;
    if (f->count[i] > f->most) f->most = f->count[i];
    if (first < f->from) f->from = first;
    if (last > f->to) f->to = last;
  }
  return DONE;
}

int widen_filter(Filter *f, int ratio, int length, int size) {
  float *of_pixels = f->weight;
  int pixels = f->stride, most = 0;
  f->stride = pixels / ratio + 4;
  f->weight = calloc((size_t)size * f->stride, sizeof *f->weight);
  f->from = length, f->to = 0;
  for (int i = 0; f->weight && i < size; i++) {
    int a = f->first[i], b = a + f->count[i] - 1, first = a / ratio, last = b / ratio;
    if (ratio == 2 && a % 2 == 0 && first > 0) first--;
    if (ratio == 2 && b % 2 == 1 && last + 1 < length) last++;
    float *weight = f->weight + (size_t)i * f->stride;
    for (int pixel = a; pixel <= b; pixel++) {
      float w = of_pixels[(size_t)i * pixels + pixel - a];
      int near = pixel / ratio, other = near + (pixel % 2 ? 1 : -1);
      if (ratio != 2 || other < 0 || other >= length) other = near;
      weight[near - first] += 0.75f * w;
      weight[other - first] += 0.25f * w;
    }
    f->first[i] = first, f->count[i] = last - first + 1;
    if (f->count[i] > most) most = f->count[i];
    if (first < f->from) f->from = first;
    if (last >= f->to) f->to = last + 1;
  }
  f->most = most;
  free(of_pixels);
  return f->weight ? DONE : NO_MEMORY;
}

int make_ring(Plane *p, int kept, int size) {
  p->kept = kept;
  p->width = (size + LANES - 1) / LANES * LANES;
  void *ring;
  if (posix_memalign(&ring, sizeof(Lanes), (size_t)kept * p->width * sizeof *p->ring)) return NO_MEMORY;
  p->ring = ring;
  return DONE;
}

void free_plane(Plane *p) {
  for (Filter *f = &p->down; f <= &p->over; f++) free(f->first), free(f->count), free(f->weight);
  free(p->ring);
}

/* `together` of all planes, known when this is compiled: each weight is fetched once for them. */
INLINE void add_some(Plane *p, int together, int planes, const Lanes *columns, int column, int rows, int size) {
  const Filter *f = &p->over;
  float *row[3][LANES];
  for (int c = 0; c < together; c++)
    for (int y = 0; y < rows; y++) row[c][y] = p[c].ring + (size_t)((p[c].rows + y) % p[c].kept) * p[c].width;
  for (int x = 0; x < size; x += LANES) {
    Lanes sums[3][LANES];
    for (int i = 0; i < LANES; i++) {
      int place = x + i < size ? x + i : size - 1;
      const float *w = f->weight + (size_t)place * f->stride;
      const Lanes *from = columns + (f->first[place] - column) * planes;
      Lanes sum[3];
      for (int c = 0; c < together; c++) sum[c] = w[0] * from[c];
      for (int t = 1; t < f->count[place]; t++) {
        from += planes;
        for (int c = 0; c < together; c++) sum[c] += w[t] * from[c];
      }
      for (int c = 0; c < together; c++) sums[c][i] = sum[c];
    }
    for (int c = 0; c < together; c++) {
      transpose(sums[c]);
      for (int y = 0; y < rows; y++) *(Lanes *)(row[c][y] + x) = sums[c][y];
    }
  }
  for (int c = 0; c < together; c++) p[c].rows += rows;
}

FAST void add_strip(Plane *p, int planes, const Lanes *columns, int column, int rows, int size) {
  int i = 0;
  for (; i + 3 <= planes; i += 3) add_some(p + i, 3, planes, columns + i, column, rows, size);
  for (; i < planes; i++) add_some(p + i, 1, planes, columns + i, column, rows, size);
}

FAST void take_row(const Plane *p, int y, float *out) {
  int count = p->down.count[y], first = p->down.first[y];
  const float *weight = p->down.weight + (size_t)y * p->down.stride;
  const float *row[4 * MOST_STRETCH + 3];
  for (int t = 0; t < count; t++) row[t] = p->ring + (size_t)((first + t) % p->kept) * p->width;
  for (int x = 0; x < p->width; x += LANES) {
    Lanes sum = weight[0] * *(const Lanes *)(row[0] + x);
    for (int t = 1; t < count; t++) sum += weight[t] * *(const Lanes *)(row[t] + x);
    *(Lanes *)(out + x) = sum;
  }
}
