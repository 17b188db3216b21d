/* The markers before the scan (ITU T.81, annex B). */

#include <string.h>

#include "jpeg.h"

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

static int read_quantizers(Header *h, const uint8_t *p, const uint8_t *end) {
  while (p < end) {
    int wide = (p[0] >> 4) + 1, number = p[0] & 15;
    if (wide > 2 || number > 3 || end - p < 1 + BLOCK * wide) return UNSUITABLE;
    h->quantizer[number] = p + 1;
    h->wide[number] = wide;
    p += 1 + BLOCK * wide;
  }
  return DONE;
}

static int read_huffman(Header *h, const uint8_t *p, const uint8_t *end) {
  while (p < end) {
    int ac = p[0] >> 4, number = p[0] & 15, symbols = 0;
    if (ac > 1 || number > 3 || end - p < 17) return UNSUITABLE;
    for (int i = 1; i <= 16; i++) symbols += p[i];
    if (symbols > 256 || end - p < 17 + symbols) return UNSUITABLE;
    h->huffman[ac][number] = p + 1;
    p += 17 + symbols;
  }
  return DONE;
}

static int read_frame(Header *h, const uint8_t *p, const uint8_t *end) {
  if (h->planes || end - p < 6 || p[0] != 8) return UNSUITABLE;
  h->rows = read16(p + 1, 0), h->columns = read16(p + 3, 0), h->planes = p[5];
  if (!h->rows || !h->columns || (h->planes != 1 && h->planes != 3) || end - p < 6 + 3 * h->planes)
    return UNSUITABLE;
  for (int i = 0; i < h->planes; i++) {
    const uint8_t *q = p + 6 + 3 * i;
    Component *c = h->component + i;
    /* A unit of a scan of one component is one block, whatever the factors say (A.2.2). */
    c->id = q[0], c->across = h->planes == 1 ? 1 : q[1] >> 4, c->down = h->planes == 1 ? 1 : q[1] & 15;
    c->quantizer = q[2];
    if (c->across < 1 || c->across > 4 || c->down < 1 || c->down > 4 || c->quantizer > 3) return UNSUITABLE;
    if (c->across > h->across) h->across = c->across;
    if (c->down > h->down) h->down = c->down;
  }
  return DONE;
}

static int read_scan(Header *h, const uint8_t *p, const uint8_t *end) {
  if (!h->planes || end - p < 4 + 2 * h->planes || p[0] != h->planes) return UNSUITABLE;
  for (int i = 0; i < h->planes; i++) {
    Component *c = h->component + i;
    c->dc = p[2 + 2 * i] >> 4, c->ac = p[2 + 2 * i] & 15;
    if (p[1 + 2 * i] != c->id || c->dc > 3 || c->ac > 3) return UNSUITABLE;
    if (!h->huffman[0][c->dc] || !h->huffman[1][c->ac] || !h->quantizer[c->quantizer]) return UNSUITABLE;
  }
  h->data = end;
  return DONE;
}

int read_header(Header *h, const uint8_t *file, size_t length) {
  int jfif = 0, transform = 1; /* Adobe's mark: 1 is YCbCr */
  memset(h, 0, sizeof *h);
  h->end = file + length;
  if (length < 4 || file[0] != 0xFF || file[1] != 0xD8) return UNSUITABLE;
  for (const uint8_t *p = file + 2; h->end - p > 4;) {
    if (p[0] != 0xFF) return UNSUITABLE;
    unsigned marker = p[1], size = read16(p + 2, 0);
    if (marker == 0xFF) { /* fill bytes may come before a marker */
      p++;
      continue;
    }
    if (size < 2 || size > h->end - p - 2) return UNSUITABLE;
    const uint8_t *body = p + 4, *next = p + 2 + size;
    int status = DONE;
    switch (marker) {
      case 0xDB: status = read_quantizers(h, body, next); break;
      case 0xC4: status = read_huffman(h, body, next); break;
      case 0xC0: case 0xC1: status = read_frame(h, body, next); break;
      case 0xDD: if (size < 4) return UNSUITABLE; h->restart = read16(body, 0); break;
      case 0xE0: jfif |= size >= 7 && !memcmp(body, "JFIF", 5); break;
      case 0xE1: if (orientation(body, size - 2) != 1) return UNSUITABLE; break;
      case 0xEE: if (size >= 14 && !memcmp(body, "Adobe", 5)) transform = body[11]; break;
      case 0xDA: {
        int rgb = h->component[0].id == 'R' && h->component[1].id == 'G' && h->component[2].id == 'B';
        if (h->planes == 3 && !jfif && (transform != 1 || rgb)) return UNSUITABLE;
        return read_scan(h, body, next);
      }
      default: /* other frames than the plain ones, and what may not be here */
        if ((marker >= 0xC2 && marker <= 0xCF) || marker < 0xC0 || (marker >= 0xD0 && marker <= 0xDF))
          return UNSUITABLE;
    }
    if (status != DONE) return status;
    p = next;
  }
  return UNSUITABLE;
}
