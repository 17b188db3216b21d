/* Decoding of plain JPEG files (ITU T.81: sequential, Huffman-coded, 8 bits, one scan, grey or YCbCr), made
   for parts of them: what the part does not need is only stepped over. */

#ifndef JPEG_H
#define JPEG_H

#include <stddef.h>
#include <stdint.h>

#include "resize.h"

enum { MOST_PLANES = 3, BLOCK = 64 };

/* ---- header.c: what a file's header says ---- */

typedef struct {
  int id, across, down; /* sampling factors: blocks in a unit (MCU) */
  int quantizer, dc, ac; /* numbers of tables */
} Component;

typedef struct {
  const uint8_t *data, *end; /* the entropy-coded data, and all that comes after */
  int rows, columns, planes;
  Component component[MOST_PLANES];
  int across, down; /* the largest sampling factors */
  int restart;      /* units between restart markers, or 0 */
  const uint8_t *quantizer[4]; /* 64 numbers in zigzag order, of `wide` bytes; NULL: there is none */
  int wide[4];
  const uint8_t *huffman[2][4]; /* DC and AC: how many codes there are of 1 to 16 bits, then the symbols */
} Header;

/* UNSUITABLE unless the file is plain and upright. */
int read_header(Header *h, const uint8_t *file, size_t length);

INLINE unsigned read16(const uint8_t *p, int little) {
  return little ? p[0] | p[1] << 8 : p[0] << 8 | p[1];
}

/* ---- entropy.c: from the coded data to blocks of coefficients ---- */

enum { LOOK = 9, END = 128, WINDOW = 4096, SLACK = 512 };

/* Where the k-th coefficient in zigzag order goes. A run may lead beyond 63: to a place that does not count. */
extern const uint8_t natural[BLOCK + END];

/* A symbol and the number that follows it, a byte for each: the bits of both; of the symbol's code; of the
   number; and the zeros before the number, or END: the block has no more. 0 if the code is longer than LOOK. */
typedef uint32_t Code;

typedef struct {
  Code quick[1 << LOOK];     /* by the next LOOK bits */
  uint32_t limit[18];        /* codes of so many bits, as 16, are below this */
  int32_t offset[18];        /* symbol's place = code + offset */
  const uint8_t *symbols;
  int ac;
} Codes;

typedef struct {
  uint64_t bits; /* the next ones, from the top */
  int count;     /* how many there are at least */
  const uint8_t *at, *stop, *past; /* next byte to take from the window, its end, and the end of what is real */
  const uint8_t *in, *end;         /* next byte of the file to go into the window */
  int ended;                       /* a marker was met, or the end of the file */
  int failed;
  uint8_t window[WINDOW + SLACK];
} Reader;

int make_codes(Codes *c, const uint8_t *table, int ac);
void start_reading(Reader *r, const uint8_t *data, const uint8_t *end);

/* Whether more was read than there is before the next marker. */
int has_overrun(const Reader *r);

/* Goes over `count` restart markers, of which the first has the number `number`; false if they are not there. */
int pass_markers(Reader *r, int number, int count);

/* One block: its DC coefficient's change is added to *dc. The others go to block[64] in natural order, which
   must be zeros, DC left out. Gives 0 if there are none; on damage, r->failed is set. */
int read_block(Reader *r, const Codes *dc_codes, const Codes *ac_codes, int *dc, int16_t *block);
void skip_block(Reader *r, const Codes *dc_codes, const Codes *ac_codes, int *dc);

/* ---- cut.c: from blocks to the part ---- */

/* Cuts (top, left, bottom, right) out, (height, size, channels), as RGB or, with one channel, as luma.
   `inside`: the pixels around it do not count. A plane is decoded at a half, quarter or eighth of its size if that
   leaves `spare` times the result's pixels. `cubic`: see make_filter. */
int cut_jpeg(const Header *h, const double part[4], int inside, double spare, int cubic, uint8_t *out, int height,
             int size, int channels);

#endif
