/* Huffman decoding (ITU T.81, annexes C and F.2.2). A step is one look into a table, which knows the length of
   code and number together; so the next step waits for little. */

#include "jpeg.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bytes are taken eight at a time, the first one lowest"
#endif

enum { MOST_BITS = 27 * BLOCK };

#define NOWHERE 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64
const uint8_t natural[BLOCK + END] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE};

#define TOTAL(code) ((code) & 63)
#define LENGTH(code) ((code) >> 8 & 63)
#define SIZE(code) ((code) >> 16 & 15)
#define RUN(code) ((code) >> 24)

/* What a symbol means, or 0 if nothing. */
static Code code_of(int symbol, int length, int ac) {
  uint32_t size = ac ? symbol & 15 : symbol, run = ac ? symbol >> 4 : 0;
  if (size > (ac ? 10 : 11)) return 0;
  if (ac && !size) {
    if (run == 0) run = END;
    else if (run != 15) return 0;
  }
  return (length + size) | length << 8 | size << 16 | run << 24;
}

int make_codes(Codes *c, const uint8_t *table, int ac) {
  memset(c, 0, sizeof *c);
  c->symbols = table + 16, c->ac = ac;
  uint32_t code = 0;
  int place = 0;
  for (int length = 1; length <= 16; length++) {
    int n = table[length - 1];
    c->offset[length] = place - (int32_t)code;
    if (code + n > 1u << length) return UNSUITABLE; /* more codes than there are */
    for (int i = 0; i < n; i++, code++, place++) {
      Code one = code_of(c->symbols[place], length, ac);
      if (!one) return UNSUITABLE;
      if (length <= LOOK)
        for (int j = 0; j < 1 << (LOOK - length); j++) c->quick[(code << (LOOK - length)) + j] = one;
    }
    c->limit[length] = code << (16 - length);
    code <<= 1;
  }
  return DONE;
}

/* ---- bits ---- */

void start_reading(Reader *r, const uint8_t *data, const uint8_t *end) {
  r->in = data, r->end = end;
  r->at = r->stop = r->past = r->window;
  r->bits = 0, r->count = 0, r->ended = 0, r->failed = 0;
}

/* How many of eight bytes come before the first FF: where taking 1 from the complement borrows. */
INLINE int before_ff(uint64_t bytes) {
  uint64_t found = (~bytes - 0x0101010101010101) & bytes & 0x8080808080808080;
  return found ? __builtin_ctzll(found) / 8 : 8;
}

/* Fills the window with what comes next, without the zeros that are stuffed in after each FF. */
static void fill_window(Reader *r) {
  if (r->ended) { /* the zeros beyond are used up: more was read than is there */
    r->failed = 1;
    r->at = r->past;
    return;
  }
  size_t left = r->stop - r->at;
  memmove(r->window, r->at, left);
  uint8_t *to = r->window + left, *full = r->window + WINDOW;
  const uint8_t *in = r->in, *end = r->end;
  int ended = 0;
  while (to < full && !ended) {
    uint64_t next;
    int n = 8;
    if (end - in >= 8) memcpy(&next, in, 8), memcpy(to, &next, 8), n = before_ff(next);
    else if (in == end || *in == 0xFF) n = 0;
    else *to = *in, n = 1;
    to += n, in += n;
    if (n == 8) continue;
    if (in == end || (*in == 0xFF && (end - in < 2 || in[1]))) ended = 1; /* a marker */
    else if (*in == 0xFF) *to++ = 0xFF, in += 2;
  }
  r->in = in;
  r->at = r->window;
  r->past = to;
  r->ended = ended;
  if (ended) memset(to, 0, r->window + sizeof r->window - to), to = r->window + sizeof r->window - 8;
  r->stop = to;
}

/* Room for a whole block: then no step needs to ask. */
INLINE void prepare(Reader *r) {
  if (r->stop - r->at < MOST_BITS / 8 + 16) fill_window(r);
}

static Code long_code(const Codes *c, uint64_t bits) {
  uint32_t next = bits >> 48;
  for (int length = LOOK + 1; length <= 16; length++)
    if (next < c->limit[length])
      return code_of(c->symbols[(int32_t)(next >> (16 - length)) + c->offset[length]], length, c->ac);
  return 0;
}

/* The number after a code: negative ones begin with 0 (F.2.2.1). No branch, for it could not be foretold. */
INLINE int value_of(uint64_t bits, Code code) {
  uint64_t from = bits << LENGTH(code);
  int value = (from >> 1) >> (63 - SIZE(code));
  return value + ((1 - (1 << SIZE(code))) & ~(int)((int64_t)from >> 63));
}

/* Fills up to at least 56 bits, which are two codes with their numbers. */
#define REFILL()                                  \
  do {                                            \
    uint64_t next;                                \
    memcpy(&next, at, 8);                         \
    bits |= __builtin_bswap64(next) >> count;     \
    at += (63 - count) >> 3;                      \
    count |= 56;                                  \
  } while (0)

#define STEP(codes)                                                                                      \
  do {                                                                                                   \
    code = (codes)->quick[bits >> (64 - LOOK)];                                                          \
    if (__builtin_expect(!code, 0) && !(code = long_code(codes, bits))) { /* no such code: damage */     \
      r->failed = 1;                                                                                     \
      goto done;                                                                                         \
    }                                                                                                    \
  } while (0)

#define CONSUME() bits <<= TOTAL(code), count -= TOTAL(code)

#define COEFFICIENT()                                                \
  do {                                                               \
    STEP(ac_codes);                                                  \
    k += RUN(code);                                                  \
    if (block) block[natural[k]] = value_of(bits, code);             \
    k++;                                                             \
    CONSUME();                                                       \
  } while (0)

INLINE int next_block(Reader *r, const Codes *dc_codes, const Codes *ac_codes, int *dc, int16_t *block) {
  prepare(r);
  uint64_t bits = r->bits;
  const uint8_t *at = r->at;
  int count = r->count, k = 1;
  Code code;
  REFILL();
  STEP(dc_codes);
  *dc = (int16_t)(*dc + value_of(bits, code));
  CONSUME();
  for (;;) {
    COEFFICIENT();
    if (k >= BLOCK) break;
    REFILL();
    COEFFICIENT();
    if (k >= BLOCK) break;
  }
  if (k > BLOCK && k < END) r->failed = 1; /* a run beyond the block */
done:
  r->bits = bits, r->at = at, r->count = count;
  return k != END + 2;
}

FAST int read_block(Reader *r, const Codes *dc_codes, const Codes *ac_codes, int *dc, int16_t *block) {
  return next_block(r, dc_codes, ac_codes, dc, block);
}

FAST void skip_block(Reader *r, const Codes *dc_codes, const Codes *ac_codes, int *dc) {
  next_block(r, dc_codes, ac_codes, dc, NULL);
}

int has_overrun(const Reader *r) { return (r->at - r->past) * 8 > r->count; }

int pass_markers(Reader *r, int number, int count) {
  const uint8_t *p = r->in;
  for (; count; count--, number++) {
    for (;;) {
      p = memchr(p, 0xFF, r->end - p);
      if (!p || r->end - p < 2) return 0;
      if (p[1] != 0 && p[1] != 0xFF) break;
      p += p[1] == 0xFF ? 1 : 2;
    }
    if (p[1] != 0xD0 + (number & 7)) return 0;
    p += 2;
  }
  start_reading(r, p, r->end);
  return 1;
}
