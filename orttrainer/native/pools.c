/* The gradient of MaxPool: dX is the sum of dY over the windows whose first maximum is there, as in PyTorch, for which a NaN
   is larger than all. Tensors lie as they are, [images * channels, depth, height, width], or in ONNX Runtime's blocks of
   channels, [images * channels / B, height, width, B]; axes that a window has not got are of length 1.

   A thread works on whole planes, which no other one touches: the same bits with any number of threads. */

#define POOL_CHUNKS 64
#define POOL_ALONE 8192 /* elements of X that one thread works on sooner than it shares them */
#define ROW_OF_WINDOWS 64
#define INLINE static inline __attribute__((always_inline))

typedef int32_t Mask8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Mask16 __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct Pool {
  const float *x, *dy;
  float *dx;
  int64_t block, planes, planes_of_chunk, x_size[3], y_size[3];
  void (*plane)(const struct Pool *g, const float *x, const float *dy, float *dx);
} Pool;

/* Where a window begins along one axis, which may be before X, and which of its taps are inside. */
typedef struct {
  int64_t begin;
  int first, last;
} Taps;

INLINE Taps taps_of(const Window *w, int axis, int64_t place, int64_t size) {
  const int64_t step = w->dilations[axis];
  Taps t = {.begin = place * w->strides[axis] - w->begin[axis], .last = w->kernel[axis]};
  while (t.first < t.last && t.begin + t.first * step < 0) ++t.first;
  while (t.first < t.last && t.begin + (t.last - 1) * step >= size) --t.last;
  return t;
}

/* Whether each element of x is in exactly one window. */
INLINE int tile(const Window *w, const Pool *g) {
  int apart = 1;
  for (int i = 0; i < 3; ++i)
    apart &= w->kernel[i] == w->strides[i] && (w->dilations[i] == 1 || w->kernel[i] == 1) && w->begin[i] == 0 &&
             g->y_size[i] * w->strides[i] == g->x_size[i];
  return apart;
}

#define FOR_EACH_TAP                             \
  for (int k = a.first; k < a.last; ++k)         \
    for (int l = b.first; l < b.last; ++l)       \
      for (int m = c.first; m < c.last; ++m)
#define WHOLE(axis) ((Taps){.last = w->kernel[axis]})
#define TAP_NUMBER ((k * w->kernel[1] + l) * w->kernel[2] + m)
#define TAP_OFFSET (k * steps[0] + l * steps[1] + m * steps[2])

/* One window, then the windows of one plane, of B channels side by side. Whatever the sizes, no tap outside of x is read or
   written. Where the window is whole its taps are constants, as `w` is, and the compiler writes them out one by one. */
#define POOL_OF_BLOCKS(B, VECTOR, MASK)                                                                        \
  INLINE void window_##B(const Window *w, const float *x, const float *dy, float *dx, const int64_t *steps,    \
                         Taps a, Taps b, Taps c, int adds) {                                                   \
    VECTOR best = (VECTOR){0} - INFINITY;                                                                      \
    MASK where = (MASK){0} + ((a.first * w->kernel[1] + b.first) * w->kernel[2] + c.first); /* if all are -inf */ \
    FOR_EACH_TAP {                                                                                             \
      const VECTOR v = *(const VECTOR *)(x + TAP_OFFSET);                                                      \
      const MASK more = (MASK)((v > best) | (v != v));                                                         \
      best = (VECTOR)(((MASK)v & more) | ((MASK)best & ~more));                                                \
      where = (TAP_NUMBER & more) | (where & ~more);                                                           \
    }                                                                                                          \
    const MASK d = *(const MASK *)dy;                                                                          \
    FOR_EACH_TAP {                                                                                             \
      VECTOR *const sum = (VECTOR *)(dx + TAP_OFFSET), part = (VECTOR)(d & (MASK)(where == TAP_NUMBER));       \
      if (adds) *sum += part;                                                                                  \
      else *sum = part;                                                                                        \
    }                                                                                                          \
  }                                                                                                            \
                                                                                                               \
  INLINE void plane_##B(const Window *w, const Pool *g, const float *x, const float *dy, float *dx) {          \
    const int adds = !tile(w, g);                                                                              \
    if (adds) memset(dx, 0, B * g->x_size[0] * g->x_size[1] * g->x_size[2] * sizeof(float));                   \
    const int64_t row = B * g->x_size[2], plane = row * g->x_size[1];                                          \
    const int64_t steps[] = {plane * w->dilations[0], row * w->dilations[1], B * w->dilations[2]};             \
    for (int64_t p = 0; p < g->y_size[0]; ++p) {                                                               \
      const Taps a = taps_of(w, 0, p, g->x_size[0]);                                                           \
      for (int64_t q = 0; q < g->y_size[1]; ++q) {                                                             \
        const Taps b = taps_of(w, 1, q, g->x_size[1]);                                                         \
        const int whole = a.last - a.first == w->kernel[0] && b.last - b.first == w->kernel[1];                \
        for (int64_t r = 0; r < g->y_size[2]; ++r, dy += B) {                                                  \
          const Taps c = taps_of(w, 2, r, g->x_size[2]);                                                       \
          const int64_t at = a.begin * plane + b.begin * row + c.begin * B;                                    \
          if (!adds)                                                                                           \
            window_##B(w, x + at, dy, dx + at, steps, WHOLE(0), WHOLE(1), WHOLE(2), 0);                        \
          else if (whole && c.last - c.first == w->kernel[2])                                                  \
            window_##B(w, x + at, dy, dx + at, steps, WHOLE(0), WHOLE(1), WHOLE(2), 1);                        \
          else                                                                                                 \
            window_##B(w, x + at, dy, dx + at, steps, a, b, c, 1);                                             \
        }                                                                                                      \
      }                                                                                                        \
    }                                                                                                          \
  }

POOL_OF_BLOCKS(8, Vector8, Mask8)
POOL_OF_BLOCKS(16, Vector16, Mask16)

/* Some windows of a row that is not in blocks, which all have these taps: tap by tap, where the largest is so far. */
INLINE void windows_1(const Window *w, const float *x, const float *dy, float *dx, const int64_t *steps, int64_t count,
                      Taps a, Taps b, Taps c) {
  const int64_t stride = w->strides[2];
  float best[ROW_OF_WINDOWS];
  int64_t where[ROW_OF_WINDOWS];
  for (int64_t j = 0; j < count; ++j) best[j] = -INFINITY;
  for (int64_t j = 0; j < count; ++j) where[j] = a.first * steps[0] + b.first * steps[1] + c.first * steps[2] + j * stride;
  FOR_EACH_TAP {
    const int64_t tap = TAP_OFFSET;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const float v = x[tap + j * stride];
      const int more = (v > best[j]) | (v != v);
      best[j] = more ? v : best[j];
      where[j] = more ? tap + j * stride : where[j];
    }
  }
  for (int64_t j = 0; j < count; ++j) dx[where[j]] += dy[j];
}

INLINE void plane_1(const Window *w, const Pool *g, const float *x, const float *dy, float *dx) {
  const int64_t row = g->x_size[2], plane = row * g->x_size[1], stride = w->strides[2];
  const int64_t steps[] = {plane * w->dilations[0], row * w->dilations[1], w->dilations[2]};
  const int64_t room = row - 1 - (w->kernel[2] - 1) * steps[2] + w->begin[2];
  const int64_t first = (w->begin[2] + stride - 1) / stride, end = room < 0 ? 0 : room / stride + 1; /* of those that are whole */
  memset(dx, 0, plane * g->x_size[0] * sizeof(float));
  for (int64_t p = 0; p < g->y_size[0]; ++p) {
    const Taps a = taps_of(w, 0, p, g->x_size[0]);
    for (int64_t q = 0; q < g->y_size[1]; ++q) {
      const Taps b = taps_of(w, 1, q, g->x_size[1]);
      if (a.first == a.last || b.first == b.last) {
        dy += g->y_size[2];
        continue;
      }
      const int whole = a.last - a.first == w->kernel[0] && b.last - b.first == w->kernel[1];
      for (int64_t r = 0, count; r < g->y_size[2]; r += count, dy += count) {
        const int inside = r >= first && r < end;
        count = !inside ? 1 : end - r < ROW_OF_WINDOWS ? end - r : ROW_OF_WINDOWS;
        if (count > g->y_size[2] - r) count = g->y_size[2] - r;
        const Taps c = taps_of(w, 2, r, row);
        const int64_t at = a.begin * plane + b.begin * row + c.begin;
        if (inside && whole) windows_1(w, x + at, dy, dx + at, steps, count, WHOLE(0), WHOLE(1), WHOLE(2));
        else if (inside) windows_1(w, x + at, dy, dx + at, steps, count, a, b, WHOLE(2));
        else if (c.first < c.last) windows_1(w, x + at, dy, dx + at, steps, 1, a, b, c);
      }
    }
  }
}

static void pool_chunk(void *data, size_t chunk) {
  const Pool *g = data;
  const int64_t first = (int64_t)chunk * g->planes_of_chunk;
  const int64_t last = first + g->planes_of_chunk < g->planes ? first + g->planes_of_chunk : g->planes;
  const int64_t x_plane = g->x_size[0] * g->x_size[1] * g->x_size[2] * g->block;
  const int64_t y_plane = g->y_size[0] * g->y_size[1] * g->y_size[2] * g->block;
  for (int64_t i = first; i < last; ++i) {
    g->plane(g, g->x + i * x_plane, g->dy + i * y_plane, g->dx + i * x_plane);
  }
}

/* Inputs: x and dy, both in blocks or neither. */
static Status *pool_gradient(Pool g, Context *context) {
  int64_t sizes[2][MOST_AXES];
  size_t axes[2];
  for (int i = 0; i < 2; ++i) TRY(read_input(context, i, i ? &g.dy : &g.x, &axes[i], sizes[i]));
  if (axes[0] != axes[1] || axes[0] < 3 || axes[0] > 5 || sizes[0][0] != sizes[1][0] || sizes[0][1] != sizes[1][1] ||
      sizes[0][1] % g.block)
    return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  for (int axis = 0, missing = 5 - (int)axes[0]; axis < 3; ++axis) {
    g.x_size[axis] = axis < missing ? 1 : sizes[0][axis - missing + 2];
    g.y_size[axis] = axis < missing ? 1 : sizes[1][axis - missing + 2];
  }
  Value *output;
  TRY(GET_OUTPUT(api)(context, 0, sizes[0], axes[0], &output));
  TRY(GET_DATA(api)(output, (void **)&g.dx));
  g.planes = sizes[0][0] * (sizes[0][1] / g.block);
  const int64_t elements = g.planes * g.block * g.x_size[0] * g.x_size[1] * g.x_size[2];
  if (!elements) return NULL;
  const int64_t chunks = elements < POOL_ALONE ? 1 : g.planes < POOL_CHUNKS ? g.planes : POOL_CHUNKS;
  g.planes_of_chunk = (g.planes + chunks - 1) / chunks;
  if (chunks > 1) return PARALLEL_FOR(api)(context, pool_chunk, (g.planes + g.planes_of_chunk - 1) / g.planes_of_chunk, 0, &g);
  pool_chunk(&g, 0);
  return NULL;
}

/* The gradient for one window: a function NAME_gradient for the table of kernels. */
#define POOL_GRADIENT(NAME, B, ...)                                                                             \
  static void NAME##_plane(const Pool *g, const float *x, const float *dy, float *dx) {                         \
    static const Window window = {B, __VA_ARGS__};                                                              \
    plane_##B(&window, g, x, dy, dx);                                                                           \
  }                                                                                                             \
  static Status *NAME##_gradient(const Kernel *kernel, Context *context) {                                      \
    return pool_gradient((Pool){.block = B, .plane = NAME##_plane}, context);                                   \
  }
