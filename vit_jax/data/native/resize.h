/* Resizing planes of float with an antialiased filter, eight source rows at a time. */

#ifndef RESIZE_H
#define RESIZE_H

#include <stdint.h>

/* Compiled for the newest processors and for any; which is used is decided when the module is loaded, as glibc
   allows. GCC before 12 knows no levels of x86-64 here; Clang before 18 cannot do it for functions that another file
   calls. Contracted multiply-adds are off (setup.py), so that all give the same bits. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(__clang__)
#define FAST
#elif __GNUC__ >= 12
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST __attribute__((target_clones("avx2", "default")))
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE /* GCC before 12 */
typedef int Places __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

enum { DONE, UNSUITABLE, NO_MEMORY };

enum { MOST_CHANNELS = 16 };

enum { LANES = 8 };
typedef float Lanes __attribute__((vector_size(4 * LANES)));

typedef struct { /* of one dimension */
  int from, to;  /* all source pixels with a weight: from <= i < to */
  int stride;    /* the places for weights of a result pixel */
  int most;      /* the most weights that a result pixel has */
  int *first;    /* (size,) the source pixel of a result pixel's first weight */
  int *count;    /* (size,) how many weights it has; 0 after that */
  float *weight; /* (size, stride), those of a result pixel sum up to 1 */
} Filter;

/* A plane on its way: strips of eight rows are made narrower as they come, and kept in a ring of rows until
   the rows of the result that need them have been taken. */
typedef struct {
  Filter down, over;
  int width;   /* of the result, as memory is laid out: a multiple of eight */
  int kept;    /* rows in the ring */
  int rows;    /* of the source that have come: all before this one */
  float *ring; /* (kept, width) */
} Plane;

/* The weights for resizing [low, high) of a line to `size` pixels, of the source's pixels least <= i < most: a
   triangle two pixels of the result wide, or `cubic`, four wide; of the source where that grows. */
int make_filter(Filter *f, double low, double high, int least, int most, int size, int cubic);

/* Changes a filter of pixels to one of the `length` samples that they come from, each `ratio` pixels wide: two
   pixels a sample are a quarter interpolated from its neighbours, as libjpeg does, more are its copies. */
int widen_filter(Filter *f, int ratio, int length, int size);

int make_ring(Plane *p, int kept, int size);
void free_plane(Plane *p);

/* The next `rows` (at most eight) rows of the source, to planes with the same filters: lane y of
   columns[i * planes + c] is pixel (p->rows + y, column + i) of plane c. */
void add_strip(Plane *p, int planes, const Lanes *columns, int column, int rows, int size);

/* Row y of the result, (width,). All its source rows must have come, and still be there. */
void take_row(const Plane *p, int y, float *out);

/* Rows of Y, Cb, Cr or of R, G, B, with room for a multiple of eight, to bytes (size, 3). */
void write_ycc(uint8_t *out, float *row[3], int size);
void write_rgb(uint8_t *out, float *row[3], int size);

/* Rows of any number of channels to bytes (size, channels). */
void write_rows(uint8_t *out, float **row, int channels, int size);

/* Cuts (top, left, bottom, right) out of (rows, columns, channels), to (height, size, channels). `inside`: the
   pixels around it do not count: cut first, then resize. `cubic`: see make_filter. */
int cut_pixels(const uint8_t *pixels, int rows, int columns, int channels, const double part[4], int inside,
               int cubic, uint8_t *out, int height, int size);

/* Eight rows of eight to eight columns of eight. */
INLINE void transpose(Lanes m[LANES]) {
  Lanes t[LANES], u[LANES];
  for (int i = 0; i < 8; i += 2) {
    t[i] = SHUFFLE(m[i], m[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = SHUFFLE(m[i], m[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = SHUFFLE(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      u[i + 2 * j + 1] = SHUFFLE(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    m[i] = SHUFFLE(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    m[i + 4] = SHUFFLE(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

#endif
