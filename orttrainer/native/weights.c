/* The gradient of a convolution for its weight, from tensors in ONNX Runtime's blocks of channels:
   [images, channels / B, height, width, B].

   Of a block of inputs and a block of outputs the gradient at a tap is a matrix of B x B, which is summed up in registers
   over a strip of pixels: for each pixel a vector of B outputs, times B inputs, one after the other. Nothing is unfolded
   or transposed. The images are cut into parts, by their number and not by that of the threads: the same bits with any
   number of threads. */

#define STRIP 192         /* pixels, about: with those of x they stay in the first cache while the taps read them */
#define WEIGHTS_CHUNKS 16 /* that the threads take, about */
#define MOST_OWN 32768    /* weights of a pair that a thread has on its stack */
#define FEWEST_TILES 128  /* that are worth to be transformed, for each part of the images; see winograd.c */
#define BLOCKS_OF_GROUP(B) (64 / (B)) /* that are summed up by tiles together, on both sides */

typedef struct {
  const Window *window;
  const float *x, *dy;
  float *parts, *dw; /* parts: none where each pair has one, and it is put where it belongs at once */
  int64_t images, parts_of_images, x_size[2], y_size[2], x_blocks, y_blocks;
  int failed;
} Weights;

BEGIN_CONTRACTED

/* Pixels: of some images a rectangle each; the steps are elements from one to the next, of x and of dy. */
typedef struct {
  int64_t images, rows, columns, x_image, x_row, x_step, dy_image, dy_row;
} Pixels;

/* sum[i] += x[i] * dy over the pixels. */
#define TAP(name, VECTOR, B)                                                                            \
  static void name(const float *x, const float *dy, const Pixels *p, float *sum) {                      \
    VECTOR s[B];                                                                                        \
    _Pragma("GCC unroll 16") for (int i = 0; i < B; ++i) s[i] = (VECTOR){0};                            \
    for (int64_t n = 0; n < p->images; ++n)                                                             \
      for (int64_t h = 0; h < p->rows; ++h) {                                                           \
        const float *at = x + n * p->x_image + h * p->x_row, *d = dy + n * p->dy_image + h * p->dy_row; \
        const int64_t columns = p->columns, step = p->x_step;                                           \
        for (int64_t w = 0; w < columns; ++w, at += step) {                                             \
          const VECTOR y = *(const VECTOR *)(d + w * B);                                                \
          _Pragma("GCC unroll 16") for (int i = 0; i < B; ++i) s[i] += at[i] * y;                       \
        }                                                                                               \
      }                                                                                                 \
    _Pragma("GCC unroll 16") for (int i = 0; i < B; ++i) *(VECTOR *)(sum + i * B) += s[i];              \
  }

#if defined(__AVX512F__)
TAP(tap_16, Vector16, 16)
#else
static void tap_16(const float *x, const float *dy, const Pixels *p, float *sum) {
  for (int64_t n = 0; n < p->images; ++n)
    for (int64_t h = 0; h < p->rows; ++h)
      for (int64_t w = 0; w < p->columns; ++w) {
        const float *at = x + n * p->x_image + h * p->x_row + w * p->x_step;
        const float *d = dy + n * p->dy_image + h * p->dy_row + w * 16;
        for (int i = 0; i < 16; ++i)
#pragma omp simd
          for (int o = 0; o < 16; ++o) sum[i * 16 + o] += at[i] * d[o];
      }
}
#endif
TAP(tap_8, Vector8, 8)

END_CONTRACTED

/* The positions whose window has its tap inside of x, along one axis: from first to last. */
static void range_of(const Window *w, int axis, int tap, int64_t x_size, int64_t y_size, int64_t *first, int64_t *last) {
  const int64_t offset = (int64_t)tap * w->dilations[axis] - w->begin[axis], stride = w->strides[axis];
  const int64_t end = x_size - offset;
  *first = offset < 0 ? (-offset + stride - 1) / stride : 0;
  *last = end > 0 ? (end + stride - 1) / stride : 0;
  if (*last > y_size) *last = y_size;
}

/* The weights of one pair, as [outputs, inputs, taps]: the sums over parts of images, each [taps, B of in, B of out]. */
static void put_weights(const Weights *g, int64_t pair, const float *sums) {
  const Window *w = g->window;
  const int64_t B = w->block, ins = g->x_blocks, taps = w->kernel[0] * w->kernel[1];
  for (int64_t o = 0; o < B; ++o) { /* of each output the weights side by side, as they are to lie in memory */
    float *dw = g->dw + ((pair / ins * B + o) * ins + pair % ins) * B * taps;
    for (int64_t i = 0; i < B; ++i)
      for (int64_t tap = 0; tap < taps; ++tap) {
        float sum = 0;
        for (int64_t part = 0; part < g->parts_of_images; ++part) sum += sums[((part * taps + tap) * B + i) * B + o];
        *dw++ = sum;
      }
  }
}

static void put_pair(void *data, size_t pair) {
  const Weights *g = data;
  const Window *w = g->window;
  put_weights(g, pair, g->parts + pair * g->parts_of_images * w->kernel[0] * w->kernel[1] * w->block * w->block);
}

/* One pair of blocks, over one part of the images. Small images go through the taps together. */
static void weights_of_pair(void *data, size_t index) {
  const Weights *g = data;
  const Window *w = g->window;
  const int64_t B = w->block, parts = g->parts_of_images, part = index % parts, pair = index / parts;
  const int64_t in = pair % g->x_blocks, out = pair / g->x_blocks, weights = w->kernel[0] * w->kernel[1] * B * B;
  const int64_t last_image = g->images * (part + 1) / parts;
  const int64_t x_plane = g->x_size[0] * g->x_size[1] * B, y_plane = g->y_size[0] * g->y_size[1] * B;
  const int64_t x_row = g->x_size[1] * B, y_row = g->y_size[1] * B, rows = STRIP / (g->y_size[1] + 1) + 1;
  const int64_t together = rows < g->y_size[0] ? 1 : STRIP * B / (y_plane + B) + 1;
  float own[g->parts ? 1 : weights], *sums = g->parts ? g->parts + (int64_t)index * weights : own;
  memset(sums, 0, sizeof(float) * weights);
  for (int64_t n = g->images * part / parts; n < last_image; n += together) {
    const float *x = g->x + (n * g->x_blocks + in) * x_plane, *dy = g->dy + (n * g->y_blocks + out) * y_plane;
    Pixels p = {.images = last_image - n < together ? last_image - n : together, .x_image = g->x_blocks * x_plane,
                .x_row = w->strides[0] * x_row, .x_step = w->strides[1] * B, .dy_image = g->y_blocks * y_plane,
                .dy_row = y_row};
    for (int64_t strip = 0; strip < g->y_size[0]; strip += rows) {
      float *sum = sums;
      for (int k = 0; k < w->kernel[0]; ++k) {
        int64_t top, bottom;
        range_of(w, 0, k, g->x_size[0], g->y_size[0], &top, &bottom);
        if (top < strip) top = strip;
        if (bottom > strip + rows) bottom = strip + rows;
        for (int l = 0; l < w->kernel[1]; ++l, sum += B * B) {
          int64_t left, right;
          range_of(w, 1, l, g->x_size[1], g->y_size[1], &left, &right);
          if (top >= bottom || left >= right) continue;
          const int64_t row = top * w->strides[0] - w->begin[0] + (int64_t)k * w->dilations[0];
          const int64_t column = left * w->strides[1] - w->begin[1] + (int64_t)l * w->dilations[1];
          p.rows = bottom - top, p.columns = right - left;
          (B == 16 ? tap_16 : tap_8)(x + row * x_row + column * B, dy + top * y_row + left * B, &p, sum);
        }
      }
    }
  }
  if (!g->parts) put_weights(g, pair, own);
}

/* Whether to go by tiles of 2 x 2 pixels: 16 products take the place of 36, but of tiles that reach beyond the image too. */
static int goes_by_tiles(const Weights *g) {
  const int64_t tiles = (g->y_size[0] + 1) / 2 * ((g->y_size[1] + 1) / 2);
  return g->window->by_tiles && g->images * tiles >= FEWEST_TILES && 64 * tiles <= 27 * g->y_size[0] * g->y_size[1];
}

/* Inputs: x and dy, in blocks. Outputs: dW, and memory for its parts, which nobody reads: ONNX Runtime keeps its memory,
   where malloc may get that of each call from the system anew. */
static Status *sum_weights(const Kernel *kernel, Context *context) {
  const Window *w = kernel->window;
  const float *data[2];
  int64_t sizes[2][MOST_AXES];
  size_t axes[2];
  for (int i = 0; i < 2; ++i) TRY(read_input(context, i, &data[i], &axes[i], sizes[i]));
  const int64_t channels = sizes[0][1], outputs = sizes[1][1];
  if (axes[0] != 4 || axes[1] != 4 || sizes[0][0] != sizes[1][0] || channels % w->block || outputs % w->block)
    return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  const int64_t shape[] = {outputs, channels, w->kernel[0], w->kernel[1]};
  Value *output;
  Weights g = {.window = w, .x = data[0], .dy = data[1], .images = sizes[0][0], .x_size = {sizes[0][2], sizes[0][3]},
               .y_size = {sizes[1][2], sizes[1][3]}, .x_blocks = channels / w->block, .y_blocks = outputs / w->block};
  TRY(GET_OUTPUT(api)(context, 0, shape, 4, &output));
  TRY(GET_DATA(api)(output, (void **)&g.dw));
  const int64_t pairs = g.y_blocks * g.x_blocks;
  if (!pairs) return NULL;
  const int by_tiles = goes_by_tiles(&g);
  const int64_t group = by_tiles ? BLOCKS_OF_GROUP(w->block) : 1;
  const int64_t groups = (g.x_blocks + group - 1) / group * ((g.y_blocks + group - 1) / group);
  g.parts_of_images = groups < WEIGHTS_CHUNKS ? WEIGHTS_CHUNKS / groups : 1;
  if (by_tiles) {
    const int64_t most = g.images * ((g.y_size[0] + 1) / 2) * ((g.y_size[1] + 1) / 2) / FEWEST_TILES;
    if (g.parts_of_images > most) g.parts_of_images = most;
  }
  if (g.parts_of_images > g.images) g.parts_of_images = g.images > 0 ? g.images : 1;
  const int64_t weights = shape[2] * shape[3] * w->block * w->block;
  const int64_t kept = g.parts_of_images > 1 || (!by_tiles && weights > MOST_OWN) ? pairs * g.parts_of_images * weights : 0;
  TRY(GET_OUTPUT(api)(context, 1, &kept, 1, &output));
  if (kept) TRY(GET_DATA(api)(output, (void **)&g.parts));
  Status *status = PARALLEL_FOR(api)(context, by_tiles ? w->by_tiles : weights_of_pair, groups * g.parts_of_images, 0, &g);
  if (!status && g.failed) status = CREATE_STATUS(api)(FAIL, "out of memory");
  if (!status && g.parts) status = PARALLEL_FOR(api)(context, put_pair, pairs, 0, &g);
  return status;
}
