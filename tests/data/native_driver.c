/* Cuts parts out of JPEG files with what vit_jax/data/native/ compiles to, outside of Python: for sanitizers, and
   to compare compilers and processors. Prints a line for each file: how many parts could be cut, and a number that
   depends on every byte of them.

     native_driver FILE… */

#include <stdio.h>
#include <stdlib.h>

#include "jpeg.h"

static uint8_t *read_file(const char *name, size_t *length) {
  FILE *file = fopen(name, "rb");
  if (!file) exit(3);
  fseek(file, 0, SEEK_END);
  *length = ftell(file);
  rewind(file);
  uint8_t *data = malloc(*length + !*length); /* no byte more than there is, so that reading it is noticed */
  if (!data || fread(data, 1, *length, file) != *length) exit(3);
  fclose(file);
  return data;
}

int main(int count, char **names) {
  static const double shares[][4] = {{0, 0, 1, 1}, {0.3, 0.1, 0.8, 0.6}, {0.95, 0.2, 1, 0.9}, {0, 0.9, 0.02, 1}};
  static const int sizes[][2] = {{24, 24}, {7, 50}, {200, 160}, {1, 1}};
  for (int n = 1; n < count; n++) {
    size_t length;
    uint8_t *data = read_file(names[n], &length);
    uint64_t mark = 14695981039346656037u; /* FNV-1a */
    int cut = 0;
    for (int i = 0; i < 32; i++) {
      const double *share = shares[i & 3];
      int height = sizes[i >> 2 & 3][0], width = sizes[i >> 2 & 3][1], channels = i & 16 ? 1 : 3;
      Header h;
      if (read_header(&h, data, length) != DONE) break;
      double part[4] = {share[0] * h.rows, share[1] * h.columns, share[2] * h.rows, share[3] * h.columns};
      size_t size = (size_t)height * width * channels;
      uint8_t *out = malloc(size), *again = malloc(size);
      if (!out || !again) exit(3);
      if (cut_jpeg(&h, part, i & 1, i & 2 ? 1.5 : 3, i & 4, out, height, width, channels) == DONE) {
        double all[4] = {0, 0, height, width};
        if (cut_pixels(out, height, width, channels, all, 1, i & 1, again, height, width) != DONE) exit(4);
        for (size_t b = 0; b < size; b++) mark = (mark ^ out[b]) * 1099511628211u, mark = (mark ^ again[b]) * 1099511628211u;
        cut++;
      }
      free(out), free(again);
    }
    free(data);
    printf("%d %016llx\n", cut, (unsigned long long)mark);
  }
  return 0;
}
