/* Convolutions of 3 x 3 taps without strides, and their gradients for the weights, on tensors in blocks of B channels, by
   minimal filtering: F(2 x 2, 3 x 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, after Winograd.

   A tile is 2 x 2 pixels of Y and the 4 x 4 of X that they come from. Transformed, Y = A' ((G w G') * (T' X T)) A, it takes
   16 products of channels where the taps take 36. These are 16 products of matrices: [tiles, channels] [channels, outputs],
   or [channels, tiles] [tiles, outputs] for the weights; of some tiles at a time, so that all of it stays in the second
   cache. The work is cut by sizes and not by threads: the same bits with any number of threads.

   The file stands once for each B, behind a line that defines it. */

#define JOINED_(a, b) a##_##b
#define JOINED(a, b) JOINED_(a, b)
#define OF(name) JOINED(name, B)

#if B == 16
#define VECTOR Vector16
#define MASK Mask16
#define WIDEST 4 /* blocks of outputs side by side in a product, at most: as many as the registers have room for */
#if defined(__AVX512F__)
#define KEEP(vector) __asm__("" : "+v"(vector)) /* or a compiler reads it from memory again for each row */
#endif
#else
#define VECTOR Vector8
#define MASK Mask8
#define WIDEST 2
#if defined(__AVX__)
#define KEEP(vector) __asm__("" : "+x"(vector))
#endif
#endif
#ifndef KEEP
#define KEEP(vector)
#endif

#define ELEMENTS 16           /* of a transformed tile */
#define TILES 24              /* at a time: a multiple of the rows of each product */
#define ROUNDED 12            /* tiles that the products take together, or half as many */
#define TILES_OF_WEIGHTS 48   /* at a time, for the weights */
#define WINOGRAD_CHUNKS 32    /* that the threads take, about */
#define GAP 16                /* floats between elements of a tile, which else would lie at the same places of the first cache */
#define UNROLLED _Pragma("GCC unroll 16") for

static int64_t OF(width)(int64_t blocks) { return blocks >= WIDEST ? WIDEST : blocks >= 2 ? 2 : 1; }

BEGIN_CONTRACTED

/* m = u v, or m += u v. v: [depth, COLUMNS * B]; m: [ROWS, COLUMNS * B]; u: [ROWS, depth], with these steps. */
#define PRODUCT(name, ROWS, COLUMNS, ROW, STEP, ADDS)                                                           \
  static void OF(name)(const float *u, const float *v, int64_t depth, float *m) {                               \
    VECTOR s[ROWS][COLUMNS];                                                                                    \
    UNROLLED(int r = 0; r < ROWS; ++r)                                                                          \
      UNROLLED(int q = 0; q < COLUMNS; ++q)                                                                     \
        s[r][q] = ADDS ? *(const VECTOR *)(m + (r * COLUMNS + q) * B) : (VECTOR){0};                            \
    for (int64_t k = 0; k < depth; ++k) {                                                                       \
      VECTOR w[COLUMNS];                                                                                        \
      UNROLLED(int q = 0; q < COLUMNS; ++q) {                                                                   \
        w[q] = *(const VECTOR *)(v + (k * COLUMNS + q) * B);                                                    \
        KEEP(w[q]);                                                                                             \
      }                                                                                                         \
      UNROLLED(int r = 0; r < ROWS; ++r)                                                                        \
        UNROLLED(int q = 0; q < COLUMNS; ++q) s[r][q] += u[r * (ROW) + k * (STEP)] * w[q];                      \
    }                                                                                                           \
    UNROLLED(int r = 0; r < ROWS; ++r)                                                                          \
      UNROLLED(int q = 0; q < COLUMNS; ++q) *(VECTOR *)(m + (r * COLUMNS + q) * B) = s[r][q];                   \
  }

PRODUCT(tiles_by_1, 12, 1, depth, 1, 0)
PRODUCT(weights_by_1, B, 1, 1, B, 1)
#if WIDEST == 4
PRODUCT(tiles_by_2, 12, 2, depth, 1, 0)
PRODUCT(tiles_by_4, 6, 4, depth, 1, 0)
PRODUCT(weights_by_2, 8, 2, 1, B, 1)
PRODUCT(weights_by_4, 4, 4, 1, B, 1)
#else
PRODUCT(tiles_by_2, 6, 2, depth, 1, 0)
PRODUCT(weights_by_2, 4, 2, 1, B, 1)
#endif

/* m: [tiles, width * B] = u: [tiles, channels] times v: [channels, width * B]. */
static void OF(multiply_tiles)(const float *u, const float *v, int64_t tiles, int64_t channels, int64_t width, float *m) {
  const int64_t rows = width == WIDEST ? 6 : 12;
  for (int64_t t = 0; t < tiles; t += rows) {
    const float *from = u + t * channels;
    float *to = m + t * width * B;
#if WIDEST == 4
    if (width == 4) OF(tiles_by_4)(from, v, channels, to);
    else
#endif
    if (width == 2) OF(tiles_by_2)(from, v, channels, to);
    else OF(tiles_by_1)(from, v, channels, to);
  }
}

/* m: [B, width * B] += u: [tiles, B], transposed, times v: [tiles, width * B]. */
static void OF(multiply_weights)(const float *u, const float *v, int64_t tiles, int64_t width, float *m) {
  const int64_t rows = width == 1 ? B : B == 8 ? 4 : 16 / width;
  for (int64_t i = 0; i < B; i += rows) {
    float *to = m + i * width * B;
#if WIDEST == 4
    if (width == 4) OF(weights_by_4)(u + i, v, tiles, to);
    else
#endif
    if (width == 2) OF(weights_by_2)(u + i, v, tiles, to);
    else OF(weights_by_1)(u + i, v, tiles, to);
  }
}

/* T' X T of B channels. */
INLINE void OF(transform_patch)(const float *x, int64_t row, float *u, int64_t element) {
  VECTOR d[4][4];
  UNROLLED(int j = 0; j < 4; ++j) {
    VECTOR c[4];
    UNROLLED(int i = 0; i < 4; ++i) c[i] = *(const VECTOR *)(x + i * row + j * B);
    d[0][j] = c[0] - c[2], d[1][j] = c[1] + c[2], d[2][j] = c[2] - c[1], d[3][j] = c[1] - c[3];
  }
  UNROLLED(int i = 0; i < 4; ++i) {
    const VECTOR e[] = {d[i][0] - d[i][2], d[i][1] + d[i][2], d[i][2] - d[i][1], d[i][1] - d[i][3]};
    UNROLLED(int j = 0; j < 4; ++j) *(VECTOR *)(u + (i * 4 + j) * element) = e[j];
  }
}

typedef struct {
  int64_t rows, columns, blocks; /* of images, whose blocks lie one behind the other */
} OF(Images);

typedef struct {
  int64_t image, row, column; /* in pixels of Y */
} OF(Place);

static OF(Place) OF(place)(int64_t tile, const OF(Images) *y) {
  const int64_t down = (y->rows + 1) / 2, across = (y->columns + 1) / 2;
  return (OF(Place)){tile / (down * across), tile / across % down * 2, tile % across * 2};
}

/* The patch of one tile, of some blocks of channels; pixels beyond the image are 0. */
static void OF(transform_tile)(const float *x, const OF(Images) *images, OF(Place) at, const int *begin, int64_t first,
                               int64_t blocks, float *u, int64_t block, int64_t element) {
  const int64_t row = at.row - begin[0], column = at.column - begin[1], plane = images->rows * images->columns * B;
  x += ((at.image * images->blocks + first) * images->rows + row) * images->columns * B + column * B;
  if (row >= 0 && column >= 0 && row + 4 <= images->rows && column + 4 <= images->columns) {
    for (int64_t c = 0; c < blocks; ++c) OF(transform_patch)(x + c * plane, images->columns * B, u + c * block, element);
    return;
  }
  float own[4 * 4 * B] = {0};
  const int64_t top = row < 0 ? -row : 0, bottom = images->rows - row < 4 ? images->rows - row : 4;
  const int64_t left = column < 0 ? -column : 0, right = images->columns - column < 4 ? images->columns - column : 4;
  for (int64_t c = 0; c < blocks; ++c) {
    for (int64_t i = top; i < bottom; ++i)
      for (int64_t j = left; j < right; ++j)
        *(VECTOR *)(own + (i * 4 + j) * B) = *(const VECTOR *)(x + c * plane + (i * images->columns + j) * B);
    OF(transform_patch)(own, 4 * B, u + c * block, element);
  }
}

/* What a convolution reads and writes; v: the transformed weights. */
typedef struct {
  const Window *window;
  const float *x, *w, *bias, *sum;
  float *v, *y;
  OF(Images) in, out;
  int64_t tiles, tiles_of_chunk;
  int relu, failed;
} OF(Convolution);

/* G w G' of one block of inputs and one of outputs; w: [outputs / B, inputs / B, 3, 3, B of in, B of out].
   v: for some blocks of outputs side by side [elements, inputs, these outputs]. */
static void OF(transform_weights)(void *data, size_t pair) {
  const OF(Convolution) *g = data;
  const int64_t ins = g->in.blocks, out = pair / ins, in = pair % ins;
  int64_t first = 0, width;
  while (out >= first + (width = OF(width)(g->out.blocks - first))) first += width;
  const float *w = g->w + pair * 9 * B * B;
  float *v = g->v + (first * ins * ELEMENTS + in * width) * B * B + (out - first) * B;
  for (int c = 0; c < B; ++c, w += B, v += width * B) {
    VECTOR t[4][3];
    UNROLLED(int j = 0; j < 3; ++j) {
      const VECTOR a = *(const VECTOR *)(w + j * B * B), b = *(const VECTOR *)(w + (3 + j) * B * B);
      const VECTOR d = *(const VECTOR *)(w + (6 + j) * B * B);
      t[0][j] = a, t[1][j] = (a + d + b) * 0.5f, t[2][j] = (a + d - b) * 0.5f, t[3][j] = d;
    }
    UNROLLED(int i = 0; i < 4; ++i) {
      const VECTOR a = t[i][0], b = t[i][1], d = t[i][2], e[] = {a, (a + d + b) * 0.5f, (a + d - b) * 0.5f, d};
      UNROLLED(int j = 0; j < 4; ++j) *(VECTOR *)(v + (i * 4 + j) * ins * width * B * B) = e[j];
    }
  }
}

INLINE void OF(put_pixel)(const OF(Convolution) *g, VECTOR y, int64_t at) {
  if (g->sum) y += *(const VECTOR *)(g->sum + at);
  if (g->relu) y = (VECTOR)((MASK)y & ~(MASK)(y < 0));
  *(VECTOR *)(g->y + at) = y;
}

/* A' M A of B outputs: 2 x 2 pixels, or as many of them as the image has. */
INLINE void OF(put_tile)(const OF(Convolution) *g, OF(Place) at, int64_t block, const float *m, int64_t element) {
  const VECTOR bias = g->bias ? *(const VECTOR *)(g->bias + block * B) : (VECTOR){0};
  const int64_t pixel = (((at.image * g->out.blocks + block) * g->out.rows + at.row) * g->out.columns + at.column) * B;
  VECTOR r[2][4];
  UNROLLED(int j = 0; j < 4; ++j) {
    VECTOR c[4];
    UNROLLED(int i = 0; i < 4; ++i) c[i] = *(const VECTOR *)(m + (i * 4 + j) * element);
    r[0][j] = c[0] + c[1] + c[2], r[1][j] = c[1] - c[2] - c[3];
  }
  for (int i = 0; i < 2 && at.row + i < g->out.rows; ++i) {
    const int64_t row = pixel + i * g->out.columns * B;
    OF(put_pixel)(g, r[i][0] + r[i][1] + r[i][2] + bias, row);
    if (at.column + 1 < g->out.columns) OF(put_pixel)(g, r[i][1] - r[i][2] - r[i][3] + bias, row + B);
  }
}

static void OF(convolve_chunk)(void *data, size_t chunk) {
  OF(Convolution) *g = data;
  const int64_t channels = g->in.blocks * B, element = TILES * channels + GAP, m_element = TILES * WIDEST * B + GAP;
  const int64_t begin = (int64_t)chunk * g->tiles_of_chunk;
  const int64_t end = begin + g->tiles_of_chunk < g->tiles ? begin + g->tiles_of_chunk : g->tiles;
  float *const u = take_scratch(ELEMENTS * (element + m_element));
  if (!u) {
    g->failed = 1;
    return;
  }
  float *const m = u + ELEMENTS * element;
  for (int64_t first = begin; first < end; first += TILES) {
    const int64_t count = end - first < TILES ? end - first : TILES, rounded = (count + ROUNDED - 1) / ROUNDED * ROUNDED;
    for (int64_t t = 0; t < rounded; ++t) { /* those that are too many are the last one once more, and nobody reads them */
      const OF(Place) at = OF(place)(first + (t < count ? t : count - 1), &g->out);
      OF(transform_tile)(g->x, &g->in, at, g->window->begin, 0, g->in.blocks, u + t * channels, B, element);
    }
    for (int64_t block = 0, width; block < g->out.blocks; block += width) {
      width = OF(width)(g->out.blocks - block);
      const float *v = g->v + block * B * channels * ELEMENTS;
      for (int k = 0; k < ELEMENTS; ++k, v += channels * width * B)
        OF(multiply_tiles)(u + k * element, v, rounded, channels, width, m + k * m_element);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t q = 0; q < width; ++q)
          OF(put_tile)(g, OF(place)(first + t, &g->out), block + q, m + (t * width + q) * B, m_element);
    }
  }
  give_scratch(u);
}

/* Where nobody reads what is added later, Y is written over it. */
static size_t OF(over_sum)(int **inputs, int **outputs) {
  static int third[] = {2}, first[] = {0};
  *inputs = third, *outputs = first;
  return 1;
}

static size_t OF(over_sum_behind_bias)(int **inputs, int **outputs) {
  static int fourth[] = {3}, first[] = {0};
  *inputs = fourth, *outputs = first;
  return 1;
}

/* Inputs: x and w in blocks, and where the kernel has them a bias and what is added. Outputs: y, and memory for the
   transformed weights, as in weights.c. */
static Status *OF(convolve)(const Kernel *kernel, Context *context) {
  const Window *w = kernel->window;
  const float *data[4];
  int64_t sizes[4][MOST_AXES];
  int fits = 1;
  for (int i = 0; i < kernel->inputs; ++i) {
    const Value *input;
    size_t axes;
    TRY(GET_INPUT(api)(context, i, &input));
    TRY(GET_DATA(api)((Value *)input, (void **)&data[i]));
    TRY(sizes_of(input, &axes, sizes[i]));
    fits &= axes == (w->has_bias && i == 2 ? 1 : 4);
  }
  const int64_t *x = sizes[0], outputs = sizes[1][0];
  const int64_t shape[] = {x[0], outputs, x[2] + w->begin[0] + w->end[0] - 2, x[3] + w->begin[1] + w->end[1] - 2};
  fits = fits && x[1] % B == 0 && outputs % B == 0 && sizes[1][1] == x[1] && sizes[1][2] == 3 && sizes[1][3] == 3;
  if (w->has_bias) fits = fits && sizes[2][0] == outputs;
  for (int k = 0; w->has_sum && k < 4; ++k) fits = fits && sizes[2 + w->has_bias][k] == shape[k];
  if (!fits || shape[2] < 0 || shape[3] < 0)
    return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  OF(Convolution) g = {.window = w, .x = data[0], .w = data[1], .relu = w->relu, .in = {x[2], x[3], x[1] / B},
                       .out = {shape[2], shape[3], outputs / B}};
  if (w->has_bias) g.bias = data[2];
  if (w->has_sum) g.sum = data[2 + w->has_bias];
  Value *output;
  TRY(GET_OUTPUT(api)(context, 0, shape, 4, &output));
  TRY(GET_DATA(api)(output, (void **)&g.y));
  g.tiles = x[0] * ((shape[2] + 1) / 2) * ((shape[3] + 1) / 2);
  if (!g.tiles || !outputs) return NULL;
  TRY(GET_OUTPUT(api)(context, 1, (int64_t[]){ELEMENTS * x[1] * outputs}, 1, &output));
  TRY(GET_DATA(api)(output, (void **)&g.v));
  g.tiles_of_chunk = (g.tiles + WINOGRAD_CHUNKS * TILES - 1) / (WINOGRAD_CHUNKS * TILES) * TILES;
  Status *status = PARALLEL_FOR(api)(context, OF(transform_weights), g.out.blocks * g.in.blocks, 0, &g);
  if (!status) status = PARALLEL_FOR(api)(context, OF(convolve_chunk), (g.tiles + g.tiles_of_chunk - 1) / g.tiles_of_chunk, 0, &g);
  return status || !g.failed ? status : CREATE_STATUS(api)(FAIL, "out of memory");
}

/* A dY A' of one tile, of B outputs. */
INLINE void OF(transform_dy)(const float *dy, int64_t row, int down, int right, float *d, int64_t element) {
  const VECTOR none = {0}, a = *(const VECTOR *)dy, b = right ? *(const VECTOR *)(dy + B) : none;
  const VECTOR c = down ? *(const VECTOR *)(dy + row) : none, e = down && right ? *(const VECTOR *)(dy + row + B) : none;
  const VECTOR r[4][2] = {{a, b}, {a + c, b + e}, {a - c, b - e}, {-c, -e}};
  UNROLLED(int i = 0; i < 4; ++i) {
    const VECTOR f[] = {r[i][0], r[i][0] + r[i][1], r[i][0] - r[i][1], -r[i][1]};
    UNROLLED(int j = 0; j < 4; ++j) *(VECTOR *)(d + (i * 4 + j) * element) = f[j];
  }
}

/* G' M G of a row of B outputs. */
INLINE void OF(put_taps)(const float *m, int64_t element, float *taps) {
  VECTOR r[3][4];
  UNROLLED(int j = 0; j < 4; ++j) {
    VECTOR c[4];
    UNROLLED(int i = 0; i < 4; ++i) c[i] = *(const VECTOR *)(m + (i * 4 + j) * element);
    const VECTOR s = (c[1] + c[2]) * 0.5f;
    r[0][j] = c[0] + s, r[1][j] = (c[1] - c[2]) * 0.5f, r[2][j] = s + c[3];
  }
  UNROLLED(int i = 0; i < 3; ++i) {
    const VECTOR s = (r[i][1] + r[i][2]) * 0.5f, e[] = {r[i][0] + s, (r[i][1] - r[i][2]) * 0.5f, s + r[i][3]};
    UNROLLED(int j = 0; j < 3; ++j) *(VECTOR *)(taps + (i * 3 + j) * B * B) = e[j];
  }
}

/* Groups of blocks on both sides over one part of the images. The sums of a group: [elements, inputs, outputs side by side]. */
static void OF(weights_by_tiles)(void *data, size_t index) {
  Weights *g = data;
  const OF(Images) in = {g->x_size[0], g->x_size[1], g->x_blocks}, out = {g->y_size[0], g->y_size[1], g->y_blocks};
  const int64_t parts = g->parts_of_images, part = index % parts;
  const int64_t group = BLOCKS_OF_GROUP(B), groups = (in.blocks + group - 1) / group;
  const int64_t first_in = index / parts % groups * group, first_out = index / parts / groups * group;
  const int64_t ins = in.blocks - first_in < group ? in.blocks - first_in : group;
  const int64_t outs = out.blocks - first_out < group ? out.blocks - first_out : group;
  const int64_t tiles = (out.rows + 1) / 2 * ((out.columns + 1) / 2);
  const int64_t begin = g->images * part / parts * tiles, end = g->images * (part + 1) / parts * tiles;
  const int64_t element = TILES_OF_WEIGHTS * B * ins + GAP, d_element = TILES_OF_WEIGHTS * B * outs + GAP;
  const int64_t sums = ELEMENTS * ins * outs * B * B;
  float *const u = take_scratch(ELEMENTS * (element + d_element) + sums + 9 * B * B);
  if (!u) {
    g->failed = 1;
    return;
  }
  float *const d = u + ELEMENTS * element, *const m = d + ELEMENTS * d_element, *const taps = m + sums;
  memset(m, 0, sums * sizeof(float));
  for (int64_t first = begin; first < end; first += TILES_OF_WEIGHTS) {
    const int64_t count = end - first < TILES_OF_WEIGHTS ? end - first : TILES_OF_WEIGHTS;
    for (int64_t t = 0; t < count; ++t) {
      const OF(Place) at = OF(place)(first + t, &out);
      OF(transform_tile)(g->x, &in, at, g->window->begin, first_in, ins, u + t * B, TILES_OF_WEIGHTS * B, element);
      for (int64_t block = 0, width; block < outs; block += width) {
        width = OF(width)(outs - block);
        for (int64_t q = 0; q < width; ++q) {
          const int64_t row = (at.image * out.blocks + first_out + block + q) * out.rows + at.row;
          OF(transform_dy)(g->dy + (row * out.columns + at.column) * B, out.columns * B, at.row + 1 < out.rows,
                           at.column + 1 < out.columns, d + (block * TILES_OF_WEIGHTS + t * width + q) * B, d_element);
        }
      }
    }
    for (int k = 0; k < ELEMENTS; ++k)
      for (int64_t block = 0, width; block < outs; block += width) {
        width = OF(width)(outs - block);
        for (int64_t c = 0; c < ins; ++c)
          OF(multiply_weights)(u + k * element + c * TILES_OF_WEIGHTS * B, d + k * d_element + block * TILES_OF_WEIGHTS * B, count,
                               width, m + ((k * outs + block) * ins + c * width) * B * B);
      }
  }
  for (int64_t block = 0, width; block < outs; block += width) {
    width = OF(width)(outs - block);
    for (int64_t q = 0; q < width; ++q)
      for (int64_t c = 0; c < ins; ++c) {
        const int64_t pair = (first_out + block + q) * in.blocks + first_in + c;
        float *to = g->parts ? g->parts + (pair * parts + part) * 9 * B * B : taps;
        for (int i = 0; i < B; ++i)
          OF(put_taps)(m + (block * ins + c * width) * B * B + (i * width + q) * B, ins * outs * B * B, to + i * B);
        if (!g->parts) put_weights(g, pair, taps);
      }
  }
  give_scratch(u);
}

END_CONTRACTED

#undef OF
#undef VECTOR
#undef MASK
#undef WIDEST
#undef KEEP
