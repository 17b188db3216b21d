/* From a JPEG file, or from pixels, to a small picture of one part of it, without the GIL.

   Lives here: what `decode.py` asks for in its inner loop, and no more. Of a plain JPEG file only the
   rows and columns of the part are decoded, at a half, quarter or eighth of the size where enough is
   left; a row is used and forgotten as soon as it is decoded, so that all stays in the fast caches.
   The filter is the antialiased bilinear one: a triangle, two pixels of the result wide. Whatever is
   not plain (progressive, CMYK, turned by EXIF, damaged) is left to the caller's other decoders.

   Written against libjpeg-turbo 1.5 or newer (partial decoding), C99, GCC or Clang. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

/* Compiled for the newest processors and for any; which is used is decided when the module is loaded. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

#define CHANNELS 4 /* red, green, blue and one that is not used: a pixel is a vector of four */
typedef float Pixel __attribute__((vector_size(16)));

enum { DONE, UNSUITABLE, NO_MEMORY };

typedef struct { /* the part that becomes the picture, in pixels of the source */
  double top, left, bottom, right;
  int inside; /* whether what is around the part does not count: cut first, then resize */
} Part;

/* ---- the filter ---- */

typedef struct { /* of one dimension */
  int from, to;  /* all source pixels with a weight: from <= i < to */
  int stride;    /* the places for weights of a result pixel */
  int most;      /* the most weights that a result pixel has */
  int *first;    /* (size,) the source pixel of a result pixel's first weight */
  int *count;    /* (size,) how many weights it has; 0 after that */
  float *weight; /* (size, stride), those of a result pixel sum up to 1 */
} Filter;

/* What shrinks more would have so many weights that their rounding errors add up to half a level. */
enum { MOST_REACH = 50 };

/* The weights for resizing [low, high) of a line of `length` pixels to `size`. */
static int make_filter(Filter *f, double low, double high, int length, int inside, int size) {
  double scale = (high - low) / size, reach = scale > 1 ? scale : 1;
  int least = inside ? (int)floor(low) : 0, most = inside ? (int)ceil(high) : length;
  if (!(low < high) || least < 0 || most > length) return UNSUITABLE;
  if (reach > MOST_REACH) return UNSUITABLE;
  f->stride = 2 * (int)reach + 3; /* an open interval of 2 * reach has no more whole numbers in it */
  f->first = malloc(size * sizeof *f->first);
  f->count = malloc(size * sizeof *f->count);
  f->weight = calloc((size_t)size * f->stride, sizeof *f->weight);
  if (!f->first || !f->count || !f->weight) return NO_MEMORY;
  f->from = length;
  for (int i = 0; i < size; i++) {
    double centre = low + (i + 0.5) * scale - 0.5, sum = 0; /* where pixel j is at j */
    int first = (int)floor(centre - reach) + 1, last = (int)ceil(centre + reach);
    if (first < least) first = least;
    if (last > most) last = most;
    if (last <= first) return UNSUITABLE; /* the part is outside */
    float *weight = f->weight + (size_t)i * f->stride;
    for (int j = first; j < last; j++) sum += weight[j - first] = 1 - fabs(j - centre) / reach;
    for (int j = first; j < last; j++) weight[j - first] /= sum;
    f->first[i] = first;
    f->count[i] = last - first;
    if (f->count[i] > f->most) f->most = f->count[i];
    if (first < f->from) f->from = first;
    if (last > f->to) f->to = last;
  }
  return DONE;
}

/* Sums (n,) += two rows of bytes with weights of at most 1. Sums are in 1/256 of a grey level, weights in
   1/65536, products are cut to 16 bits: two sums in three instructions. */
FAST static void add_rows(uint16_t *restrict sums, const uint8_t *restrict one, unsigned weight_of_one,
                          const uint8_t *restrict other, unsigned weight_of_other, int n) {
  for (int i = 0; i < n; i++) {
    uint16_t a = ((uint32_t)(one[i] << 8) * weight_of_one) >> 16;
    uint16_t b = ((uint32_t)(other[i] << 8) * weight_of_other) >> 16;
    sums[i] += a + b;
  }
}

/* One row of the result, (size, 3) uint8, from the n values of `sums`, which begin with pixel `start`.
   `row` (n plus a few), `wide` (size) and `bytes` (size) are room to work in. */
FAST static void across(uint8_t *restrict out, const uint16_t *restrict sums, int n, int start,
                        const Filter *f, int size, Pixel *restrict row, Pixel *restrict wide,
                        uint32_t *restrict bytes) {
  float *values = (float *)row;
  for (int i = 0; i < n; i++) values[i] = sums[i];
  const float *w = f->weight;
  for (int x = 0; x < size; x++, w += f->stride) {
    const Pixel *p = row + f->first[x] - start;
    Pixel sum = w[0] * p[0];
    for (int t = 1; t < f->most; t++) sum += w[t] * p[t];
    wide[x] = sum;
  }
  const float *levels = (const float *)wide;
  uint8_t *level = (uint8_t *)bytes;
  for (int i = 0; i < size * CHANNELS; i++) level[i] = (int)(levels[i] * (1 / 256.0f) + 0.5f);
  for (int x = 0; x < size - 1; x++) memcpy(out + 3 * x, bytes + x, 4); /* the next goes over the fourth */
  memcpy(out + 3 * (size - 1), bytes + size - 1, 3);
}

/* Where rows come from, one after the other: each call gives the next, width pixels of four bytes. */
typedef void (*NextRow)(void *source, uint8_t *row);

typedef struct { /* all memory of one picture, on the heap: libjpeg's way out of an error is a longjmp */
  Filter down, over;
  uint8_t *rows; /* row y of the source is kept at y % kept, until the next ones need its place */
  uint16_t *sums;
  uint32_t *bytes;
  Pixel *row, *wide;
} Job;

static void free_job(Job *job) {
  if (!job) return;
  for (Filter *f = &job->down; f <= &job->over; f++) free(f->first), free(f->count), free(f->weight);
  free(job->rows), free(job->sums), free(job->bytes), free(job->row), free(job->wide), free(job);
}

/* The filters for a part, shrunk by `smaller`, of rows × columns pixels. */
static int make_filters(Job *job, const Part *p, int smaller, int rows, int columns, int height, int size) {
  double s = 1.0 / smaller;
  int status = make_filter(&job->down, p->top * s, p->bottom * s, rows, p->inside, height);
  if (status != DONE) return status;
  return make_filter(&job->over, p->left * s, p->right * s, columns, p->inside, size);
}

/* Resizes the coming rows of a source, the first of which is job->down.from; a row has the columns
   [start, start + width). Gives out (height, size, 3). */
static int resize_rows(Job *job, NextRow next, void *source, int start, int width, int height, int size,
                       uint8_t *out) {
  const Filter *down = &job->down, *over = &job->over;
  int n = width * CHANNELS, kept = down->most, at = down->from;
  job->rows = malloc((size_t)n * kept);
  job->sums = malloc(n * sizeof *job->sums);
  job->bytes = malloc(size * sizeof *job->bytes);
  size_t pixels = width + over->most; /* weights of 0 may lie beyond the end */
  if (posix_memalign((void **)&job->row, 64, pixels * sizeof *job->row)) job->row = NULL;
  if (posix_memalign((void **)&job->wide, 64, size * sizeof *job->wide)) job->wide = NULL;
  if (!job->rows || !job->sums || !job->bytes || !job->row || !job->wide) return NO_MEMORY;
  memset(job->row, 0, pixels * sizeof *job->row);
  for (int y = 0; y < height; y++) {
    int first = down->first[y], end = first + down->count[y];
    const float *w = down->weight + (size_t)y * down->stride - first;
    for (; at < end; at++) next(source, job->rows + (size_t)n * (at % kept));
    /* Each product will lose half a unit on average. */
    for (int i = 0; i < n; i++) job->sums[i] = (end - first) / 2;
    for (int i = first; i < end; i += 2) {
      int j = i + 1 < end ? i + 1 : i;
      add_rows(job->sums, job->rows + (size_t)n * (i % kept), lrintf(w[i] * 65535),
               job->rows + (size_t)n * (j % kept), j > i ? lrintf(w[j] * 65535) : 0, n);
    }
    across(out + (size_t)y * size * 3, job->sums, n, start, over, size, job->row, job->wide, job->bytes);
  }
  return DONE;
}

/* ---- from pixels ---- */

typedef struct {
  const uint8_t *next;
  Py_ssize_t stride;
  int width;
} Pixels;

static void next_pixels(void *source, uint8_t *row) {
  Pixels *p = source;
  for (int x = 0; x < p->width; x++) {
    for (int c = 0; c < 3; c++) row[CHANNELS * x + c] = p->next[3 * x + c];
    row[CHANNELS * x + 3] = 0;
  }
  p->next += p->stride;
}

static int cut_pixels(const uint8_t *pixels, int rows, int columns, const Part *part, uint8_t *out,
                      int height, int size) {
  Job *job = calloc(1, sizeof *job);
  int status = job ? make_filters(job, part, 1, rows, columns, height, size) : NO_MEMORY;
  if (status == DONE) {
    int start = job->over.from, width = job->over.to - start;
    Py_ssize_t stride = 3 * (Py_ssize_t)columns;
    Pixels source = {pixels + job->down.from * stride + 3 * start, stride, width};
    status = resize_rows(job, next_pixels, &source, start, width, height, size, out);
  }
  free_job(job);
  return status;
}

/* ---- from a JPEG file ---- */

typedef struct {
  struct jpeg_error_mgr manager; /* first, so that a pointer to it is one to this */
  jmp_buf leave;
} Errors;

static void on_error(j_common_ptr jpeg) { longjmp(((Errors *)jpeg->err)->leave, 1); }

static void on_message(j_common_ptr jpeg, int level) {
  if (level < 0) on_error(jpeg); /* a warning: the file is damaged */
}

static void next_scanline(void *source, uint8_t *row) {
  jpeg_read_scanlines((struct jpeg_decompress_struct *)source, &row, 1);
}

/* The part of a plain JPEG file of rows × columns pixels. `spare`: it may be decoded smaller as long as
   that leaves `spare` times the pixels of the result on each side. */
static int cut_jpeg(const uint8_t *data, size_t length, int rows, int columns, const Part *part,
                    double spare, uint8_t *out, int height, int size) {
  struct jpeg_decompress_struct jpeg = {0};
  Errors errors;
  Job *const job = calloc(1, sizeof *job);
  volatile int status = UNSUITABLE;
  if (!job) return NO_MEMORY;
  jpeg.err = jpeg_std_error(&errors.manager);
  errors.manager.error_exit = on_error;
  errors.manager.emit_message = on_message;
  if (setjmp(errors.leave)) {
    status = UNSUITABLE;
  } else {
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, (unsigned char *)data, length);
    jpeg_read_header(&jpeg, TRUE);
    int plain = jpeg.jpeg_color_space == JCS_YCbCr || jpeg.jpeg_color_space == JCS_GRAYSCALE ||
                jpeg.jpeg_color_space == JCS_RGB;
    int same = (int)jpeg.image_height == rows && (int)jpeg.image_width == columns;
    if (plain && same && !jpeg_has_multiple_scans(&jpeg)) {
      int smaller = 1;
      while (smaller < 8 && part->bottom - part->top >= 2 * smaller * spare * height &&
             part->right - part->left >= 2 * smaller * spare * size)
        smaller *= 2;
      jpeg.scale_num = 1, jpeg.scale_denom = smaller;
      jpeg.out_color_space = JCS_EXT_RGBX;
      jpeg_start_decompress(&jpeg);
      status = make_filters(job, part, smaller, jpeg.output_height, jpeg.output_width, height, size);
      if (status == DONE) {
        /* Chroma is interpolated between neighbours: decode two pixels more to have them. */
        JDIMENSION start = job->over.from > 2 ? job->over.from - 2 : 0;
        JDIMENSION width = job->over.to + 2 - start;
        if (start + width > jpeg.output_width) width = jpeg.output_width - start;
        jpeg_crop_scanline(&jpeg, &start, &width);
        jpeg_skip_scanlines(&jpeg, job->down.from);
        status = resize_rows(job, next_scanline, &jpeg, start, width, height, size, out);
      }
    }
  }
  jpeg_destroy_decompress(&jpeg);
  free_job(job);
  return status;
}

/* ---- what a file is, from its first bytes ---- */

static unsigned read16(const uint8_t *p, int little) {
  return little ? p[0] | p[1] << 8 : p[0] << 8 | p[1];
}

static uint32_t read32(const uint8_t *p, int little) {
  return little ? read16(p, 1) | (uint32_t)read16(p + 2, 1) << 16
                : (uint32_t)read16(p, 0) << 16 | read16(p + 2, 0);
}

/* The orientation that an APP1 segment tells (Exif 2.3, §4.6), or 1, "as it is". */
static int orientation(const uint8_t *p, size_t length) {
  if (length < 14 || memcmp(p, "Exif\0\0", 6)) return 1;
  const uint8_t *tiff = p + 6;
  size_t size = length - 6;
  int little = tiff[0] == 'I';
  size_t at = read32(tiff + 4, little);
  if (at > size || size - at < 2) return 1;
  unsigned entries = read16(tiff + at, little);
  for (at += 2; entries-- && size >= 12 && at <= size - 12; at += 12)
    if (read16(tiff + at, little) == 0x0112) return read16(tiff + at + 8, little);
  return 1;
}

/* Height and width of a JPEG file that is sequential, of 8 bits, and upright; else UNSUITABLE. */
static int plain_size(const uint8_t *p, size_t length, int *rows, int *columns) {
  if (length < 4 || p[0] != 0xFF || p[1] != 0xD8) return UNSUITABLE;
  for (size_t at = 2; at + 9 < length;) {
    if (p[at] != 0xFF) return UNSUITABLE;
    unsigned marker = p[at + 1], segment = read16(p + at + 2, 0);
    if (marker == 0xFF) { /* fill bytes may come before a marker */
      at++;
      continue;
    }
    if (segment < 2 || segment > length - at - 2) return UNSUITABLE;
    if (marker == 0xE1 && orientation(p + at + 4, segment - 2) != 1) return UNSUITABLE;
    if (marker == 0xC0 || marker == 0xC1) {
      *rows = read16(p + at + 5, 0), *columns = read16(p + at + 7, 0);
      return p[at + 4] == 8 && *rows && *columns ? DONE : UNSUITABLE;
    }
    if ((marker >= 0xC2 && marker <= 0xCF && marker != 0xC4) || marker == 0xDA) return UNSUITABLE;
    at += 2 + segment;
  }
  return UNSUITABLE;
}

/* ---- for Python ---- */

static PyObject *plain_jpeg_size(PyObject *self, PyObject *file) {
  char *data;
  Py_ssize_t length;
  int rows, columns;
  if (PyBytes_AsStringAndSize(file, &data, &length)) return NULL;
  if (plain_size((uint8_t *)data, length, &rows, &columns) != DONE) Py_RETURN_NONE;
  return Py_BuildValue("ii", rows, columns);
}

/* Gets (height, width, 3) uint8 in one piece; 0 with an error set if it is anything else. */
static int get_picture(PyObject *array, int flags, Py_buffer *b) {
  if (PyObject_GetBuffer(array, b, PyBUF_ND | flags)) return 0;
  const Py_ssize_t most = 1 << 24;
  if (b->ndim == 3 && b->shape[2] == 3 && b->itemsize == 1 && b->shape[0] > 0 && b->shape[1] > 0 &&
      b->shape[0] <= most && b->shape[1] <= most)
    return 1;
  PyBuffer_Release(b);
  PyErr_SetString(PyExc_ValueError, "a picture must be (height, width, 3) uint8, of 1 to 2**24 pixels a side");
  return 0;
}

static PyObject *answer(int status) {
  return status == NO_MEMORY ? PyErr_NoMemory() : PyBool_FromLong(status == DONE);
}

static PyObject *py_cut_jpeg(PyObject *self, PyObject *args) {
  const char *data;
  Py_ssize_t length;
  int rows, columns, status;
  Part part;
  double spare;
  PyObject *array;
  Py_buffer out;
  if (!PyArg_ParseTuple(args, "y#(ii)(dddd)pdO", &data, &length, &rows, &columns, &part.top, &part.left,
                        &part.bottom, &part.right, &part.inside, &spare, &array) ||
      !get_picture(array, PyBUF_WRITABLE, &out))
    return NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = cut_jpeg((const uint8_t *)data, length, rows, columns, &part, spare, out.buf, out.shape[0],
                    out.shape[1]);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&out);
  return answer(status);
}

static PyObject *py_cut_pixels(PyObject *self, PyObject *args) {
  int status;
  Part part;
  PyObject *source, *array;
  Py_buffer pixels, out;
  if (!PyArg_ParseTuple(args, "O(dddd)pO", &source, &part.top, &part.left, &part.bottom, &part.right,
                        &part.inside, &array) ||
      !get_picture(source, 0, &pixels))
    return NULL;
  if (!get_picture(array, PyBUF_WRITABLE, &out)) {
    PyBuffer_Release(&pixels);
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = cut_pixels(pixels.buf, pixels.shape[0], pixels.shape[1], &part, out.buf, out.shape[0],
                      out.shape[1]);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&pixels);
  PyBuffer_Release(&out);
  return answer(status);
}

static PyMethodDef methods[] = {
    {"plain_jpeg_size", plain_jpeg_size, METH_O,
     "plain_jpeg_size(file: bytes) -> (height, width), or None if cut_jpeg is not for it."},
    {"cut_jpeg", py_cut_jpeg, METH_VARARGS,
     "cut_jpeg(file, (height, width), (top, left, bottom, right), inside, spare, out) -> whether it could."},
    {"cut_pixels", py_cut_pixels, METH_VARARGS,
     "cut_pixels(pixels, (top, left, bottom, right), inside, out) -> whether it could."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "See _native.c.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
