/* Blocks to planes to the picture. Each plane is resized by itself, chroma from the fewer samples that the file
   has of it, and only pixels of the result change from YCbCr to RGB. */

#include "jpeg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the inverse discrete cosine transform (A.3.3) ---- */

#define COS(n) ((float)(n == 1 ? 0.98078528040323044913 : n == 2 ? 0.92387953251128675613 : \
                        n == 3 ? 0.83146961230254523708 : n == 4 ? 0.70710678118654752440 : \
                        n == 5 ? 0.55557023301960222474 : n == 6 ? 0.38268343236508977173 : \
                                 0.19509032201612826785)) /* of n/16 of half a turn */

/* n values of a line from its n first coefficients, which have their factors 1/2 and 1/sqrt(8) already. */
INLINE void transform(int n, Lanes x[LANES]) {
  if (n == 2) {
    Lanes odd = COS(4) * x[1];
    x[1] = x[0] - odd, x[0] = x[0] + odd;
  } else if (n == 4) {
    Lanes middle = COS(4) * x[2], sum = x[0] + middle, difference = x[0] - middle;
    Lanes one = COS(2) * x[1] + COS(6) * x[3], other = COS(6) * x[1] - COS(2) * x[3];
    x[0] = sum + one, x[1] = difference + other, x[2] = difference - other, x[3] = sum - one;
  } else if (n == 8) {
    Lanes middle = COS(4) * x[4], sum = x[0] + middle, difference = x[0] - middle;
    Lanes one = COS(2) * x[2] + COS(6) * x[6], other = COS(6) * x[2] - COS(2) * x[6];
    Lanes even[4] = {sum + one, difference + other, difference - other, sum - one};
    Lanes odd[4] = {COS(1) * x[1] + COS(3) * x[3] + COS(5) * x[5] + COS(7) * x[7],
                    COS(3) * x[1] - COS(7) * x[3] - COS(1) * x[5] - COS(5) * x[7],
                    COS(5) * x[1] - COS(1) * x[3] + COS(7) * x[5] + COS(3) * x[7],
                    COS(7) * x[1] - COS(5) * x[3] + COS(3) * x[5] - COS(1) * x[7]};
    for (int i = 0; i < 4; i++) x[i] = even[i] + odd[i], x[7 - i] = even[i] - odd[i];
  }
}

typedef int32_t Mask __attribute__((vector_size(4 * LANES)));

INLINE Lanes clamp(Lanes x) {
  Mask high = x > 255;
  Lanes below = (Lanes)((Mask)x & (x > 0));
  return (Lanes)(((Mask)below & ~high) | ((Mask)(below * 0 + 255) & high));
}

typedef int16_t Coefficients __attribute__((vector_size(2 * LANES)));

/* A block to n columns of n rows; the block is zeroed. */
INLINE void to_columns(int n, Coefficients *block, const Lanes *factors, Lanes *columns) {
  Lanes x[LANES];
  for (int i = 0; i < LANES; i++) {
    x[i] = i < n ? __builtin_convertvector(block[i], Lanes) * factors[i] : factors[0] * 0;
    block[i] = (Coefficients){0};
  }
  transform(n, x);
  transpose(x);
  transform(n, x);
  for (int i = 0; i < n; i++) {
    columns[i] = clamp(x[i] + 128);
  }
}

FAST static void invert(int n, Coefficients *block, const Lanes *factors, Lanes *columns) {
  if (n == 8) to_columns(8, block, factors, columns);
  else if (n == 4) to_columns(4, block, factors, columns);
  else to_columns(2, block, factors, columns);
}

/* The same for a block of one level, and for the smallest size. */
INLINE void fill(int n, float level, Lanes *columns) {
  Lanes same = {level, level, level, level, level, level, level, level};
  for (int i = 0; i < n; i++) columns[i] = clamp(same);
}

/* ---- a picture under way ---- */

typedef struct {
  Plane plane;
  int across, down;      /* blocks in a unit */
  int scale;             /* pixels in a block's side */
  int from, to;          /* the blocks of a row that are needed */
  int first, last;       /* the rows of units that have blocks which are needed */
  int dc;                /* the last block's DC coefficient */
  const Codes *dc_codes, *ac_codes;
  Lanes *strip[4];       /* columns of the blocks of a row of units */
  Lanes factors[LANES];  /* by which coefficients are multiplied */
} Channel;

typedef struct { /* all memory of one picture */
  Reader reader;
  Codes codes[2][4];
  Channel channel[MOST_PLANES];
  Coefficients block[LANES + 1]; /* one more, for what does not count */
  float *row[3];
  int planes;                    /* of the file, as many as the result needs; the others are stepped over */
  int begun;                     /* the unit that reading begins with */
} Job;

static void *aligned(size_t size) {
  void *memory;
  return posix_memalign(&memory, 64, size) ? NULL : memory;
}

static void free_job(Job *job) {
  for (int i = 0; i < MOST_PLANES; i++) {
    free_plane(&job->channel[i].plane);
    for (int j = 0; j < 4; j++) free(job->channel[i].strip[j]);
    free(job->row[i]);
  }
  free(job);
}

/* What a plane's coefficients are multiplied by, from its quantizer in zigzag order. */
static void make_factors(Lanes *factors, const uint8_t *quantizer, int wide) {
  for (int i = 0; i < BLOCK; i++) {
    int place = natural[i], v = place / 8, u = place % 8;
    float q = wide == 2 ? read16(quantizer + 2 * i, 0) : quantizer[i];
    factors[v][u] = q * (v ? 0.5f : 0.5f * COS(4)) * (u ? 0.5f : 0.5f * COS(4));
  }
}

/* One dimension's filter, of samples of a plane, `ratio` pixels wide; there are `length` pixels. */
static int make_line(Filter *f, double low, double high, int length, int ratio, int inside, int size, int cubic) {
  int least = inside ? (int)floor(low) : 0, most = inside ? (int)ceil(high) : length;
  int status = make_filter(f, low, high, least, most, size, cubic);
  return status == DONE && ratio > 1 ? widen_filter(f, ratio, (length + ratio - 1) / ratio, size) : status;
}

/* Everything about one plane of a picture that is decoded at luma_scale / 8 of its size. */
static int make_channel(Channel *c, const Header *h, int number, int luma_scale, const double part[4], int inside,
                        int height, int size, int cubic) {
  const Component *component = h->component + number;
  int down = h->down / component->down, over = h->across / component->across;
  if (down * component->down != h->down || over * component->across != h->across) return UNSUITABLE;
  c->scale = luma_scale;
  for (; c->scale < 8 && down % 2 == 0 && over % 2 == 0; down /= 2, over /= 2) c->scale *= 2;
  double shrink = luma_scale / 8.0;
  int rows = (h->rows * luma_scale + 7) / 8, columns = (h->columns * luma_scale + 7) / 8;
  Plane *p = &c->plane;
  int status = make_line(&p->down, part[0] * shrink, part[2] * shrink, rows, down, inside, height, cubic);
  if (status == DONE)
    status = make_line(&p->over, part[1] * shrink, part[3] * shrink, columns, over, inside, size, cubic);
  if (status != DONE) return status;
  c->from = p->over.from / c->scale, c->to = (p->over.to - 1) / c->scale + 1;
  c->first = p->down.from / (c->scale * c->down), c->last = (p->down.to - 1) / (c->scale * c->down);
  for (int i = 0; i < c->down; i++)
    if (!(c->strip[i] = aligned((size_t)(c->to - c->from) * c->scale * sizeof(Lanes)))) return NO_MEMORY;
  make_factors(c->factors, h->quantizer[component->quantizer], h->wide[component->quantizer]);
  return DONE;
}

/* The row of units after which row y of the result can be made. */
static int ready_after(const Job *job, int y) {
  int after = 0;
  for (int i = 0; i < job->planes; i++) {
    const Channel *c = job->channel + i;
    const Filter *f = &c->plane.down;
    int unit = (f->first[y] + f->count[y] - 1) / (c->scale * c->down);
    if (unit > after) after = unit;
  }
  return after;
}

static int make_job(Job *job, const Header *h, const double part[4], int inside, double spare, int cubic, int height,
                    int size, int *from, int *to) {
  int status = DONE, scale = 8;
  while (scale > 1 && (part[2] - part[0]) * scale >= 16 * spare * height &&
         (part[3] - part[1]) * scale >= 16 * spare * size)
    scale /= 2;
  *from = h->rows, *to = 0;
  for (int i = 0; i < h->planes && status == DONE; i++) {
    const Component *component = h->component + i;
    Channel *c = job->channel + i;
    for (int ac = 0; ac < 2 && status == DONE; ac++) {
      int table = ac ? component->ac : component->dc;
      Codes *codes = &job->codes[ac][table];
      if (!codes->symbols) status = make_codes(codes, h->huffman[ac][table], ac);
      if (ac) c->ac_codes = codes; else c->dc_codes = codes;
    }
    c->across = component->across, c->down = component->down;
    if (i >= job->planes) continue;
    if (status == DONE) status = make_channel(c, h, i, scale, part, inside, height, size, cubic);
    if (c->first < *from) *from = c->first;
    if (c->last + 1 > *to) *to = c->last + 1;
  }
  for (int i = 0; i < job->planes && status == DONE; i++) {
    Channel *c = job->channel + i;
    int kept = 0;
    for (int y = 0; y < height; y++) {
      int there = (ready_after(job, y) + 1) * c->scale * c->down - c->plane.down.first[y];
      if (there > kept) kept = there;
    }
    c->plane.rows = *from * c->scale * c->down;
    status = make_ring(&c->plane, kept, size);
    if (status == DONE && !(job->row[i] = aligned(c->plane.width * sizeof(float)))) status = NO_MEMORY;
  }
  return status;
}

/* Reads on to the end of a row of units: from blocks to strips. What is not needed is only stepped over. */
static void read_units(Job *job, const Header *h, int row, int units, int needed, int *number) {
  Reader *r = &job->reader;
  for (; *number < (row + 1) * units && !r->failed; ++*number) {
    if (h->restart && *number && *number % h->restart == 0 && *number != job->begun) {
      if (has_overrun(r) || !pass_markers(r, *number / h->restart - 1, 1)) r->failed = 1;
      for (int i = 0; i < h->planes; i++) job->channel[i].dc = 0;
    }
    for (int i = 0; i < h->planes; i++) {
      Channel *c = job->channel + i;
      for (int v = 0; v < c->down; v++)
        for (int u = 0; u < c->across; u++) {
          int place = (*number - row * units) * c->across + u;
          if (!needed || place < c->from || place >= c->to) { /* all of a plane that the result does not need */
            skip_block(r, c->dc_codes, c->ac_codes, &c->dc);
            continue;
          }
          int more = read_block(r, c->dc_codes, c->ac_codes, &c->dc, (int16_t *)job->block);
          Lanes *columns = c->strip[v] + (place - c->from) * c->scale;
          if (more && c->scale > 1) {
            job->block[0][0] = c->dc;
            invert(c->scale, job->block, c->factors, columns);
          } else {
            fill(c->scale, c->dc * c->factors[0][0] + 128, columns);
            if (more) memset(job->block, 0, sizeof job->block);
          }
        }
    }
  }
}

static int run_job(Job *job, const Header *h, int from, int to, uint8_t *out, int height, int size, int channels) {
  int units = (h->columns + 8 * h->across - 1) / (8 * h->across), number = 0, y = 0;
  start_reading(&job->reader, h->data, h->end);
  if (h->restart && from * units >= h->restart) { /* the intervals before the part need not be read */
    int intervals = from * units / h->restart;
    job->begun = number = intervals * h->restart;
    if (!pass_markers(&job->reader, 0, intervals)) return UNSUITABLE;
  }
  for (int row = number / units; row < to; row++) {
    read_units(job, h, row, units, row >= from, &number);
    if (job->reader.failed) return UNSUITABLE;
    if (row < from) continue;
    for (int i = 0; i < job->planes; i++) {
      Channel *c = job->channel + i;
      for (int v = 0; v < c->down; v++) add_strip(&c->plane, 1, c->strip[v], c->from * c->scale, c->scale, size);
    }
    for (; y < height && ready_after(job, y) <= row; y++) {
      for (int i = 0; i < job->planes; i++) take_row(&job->channel[i].plane, y, job->row[i]);
      uint8_t *line = out + (size_t)y * size * channels;
      if (job->planes == 3) write_ycc(line, job->row, size);
      else write_rows(line, (float *[]){job->row[0], job->row[0], job->row[0]}, channels, size);
    }
  }
  return has_overrun(&job->reader) ? UNSUITABLE : DONE;
}

int cut_jpeg(const Header *h, const double part[4], int inside, double spare, int cubic, uint8_t *out, int height,
             int size, int channels) {
  if (channels != 1 && channels != 3) return UNSUITABLE;
  if (!(part[0] >= 0 && part[1] >= 0 && part[2] <= h->rows && part[3] <= h->columns)) return UNSUITABLE;
  Job *job = aligned(sizeof *job);
  if (!job) return NO_MEMORY;
  memset(job, 0, sizeof *job);
  job->planes = channels == 1 ? 1 : h->planes;
  int from, to, status = make_job(job, h, part, inside, spare, cubic, height, size, &from, &to);
  if (status == DONE) status = run_job(job, h, from, to, out, height, size, channels);
  free_job(job);
  return status;
}
