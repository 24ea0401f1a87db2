/* Operators that run a whole loop over time: what is generated gives a Loop to a kernel of the table.

   A step is a few stages, one behind the other; the rows of a stage are cut into chunks, which the threads of ONNX
   Runtime take. Nobody waits for a thread to come: who is there takes the chunks that are left, and waits only for those
   that another one is working on. So the same threads stay through all steps, with weights in their own caches. */

#include <sched.h>
#include <string.h>

#define CHUNKS 16            /* of a stage, at most */
#define LEAST_ELEMENTS 1024  /* of a chunk that works element by element */
#define ALONE 131072         /* multiplications of a step that one thread makes sooner than it shares them */
#define TIMES -1             /* sizes that the inputs decide */
#define COLUMNS -2

/* What a stage reads and writes at one time. in: states, slices, and what does not change; out: new states, slices. */
typedef struct {
  const void *in[MOST_TENSORS];
  void *out[MOST_TENSORS];
  float *made;
  int64_t columns;
} Frame;

/* run: for the rows first to last.
   unit: of a product, whose chunks are whole blocks of so many rows; 0: it works element by element. */
typedef struct {
  void (*run)(const Frame *frame, int64_t first, int64_t last);
  int64_t rows, unit;
} Stage;

/* states: the first inputs and outputs; slices: the inputs behind them. The rest of the inputs does not change, the rest
   of the outputs are slices.
   axes, sizes: of each input, at most 3, of which `sizes` has 3 places each.
   out_rows: of each output, which is a matrix at each time.
   reversed: for each slice of the inputs, then of the outputs, whether it goes from the last time to the first.
   made_rows: of all that lies between stages.
   multiplications: of a step, for each column. */
typedef struct Loop {
  int states, slices, made_slices;
  const int *axes;
  const int64_t *sizes, *out_rows;
  const int *reversed;
  int64_t made_rows, multiplications;
  int stages;
  const Stage *stage;
} Loop;

static int64_t bytes_of(int type) {
  switch (type) {
    case 9: return 1;           /* bool */
    case 7: case 11: case 13: return 8; /* int64, double, uint64 */
    default: return 4;
  }
}

/* y = w x + c for the rows first to last of w [rows, depth]; x: [depth, columns]; c: none, a column, or as wide as y.

   Blocks of rows and columns are summed up in registers, and w is read as it lies: once a step, in one run a row. The
   product is added without rounding it first. */
BEGIN_CONTRACTED

typedef float Vector4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Vector8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Vector16 __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct {
  const float *w, *x, *c;
  float *y;
  int64_t depth, columns;
  int c_is_wide;
} Product;

#define BLOCK(name, VECTOR, ROWS, VECTORS)                                                           \
  static void name(const Product *p, int64_t row, int64_t column) {                                  \
    enum { LANES = sizeof(VECTOR) / sizeof(float) };                                                 \
    const int64_t depth = p->depth, columns = p->columns;                                            \
    const float *w = p->w + row * depth, *x = p->x + column;                                         \
    VECTOR sum[ROWS][VECTORS];                                                                       \
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)                                          \
      _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) {                                    \
        if (p->c_is_wide) sum[r][v] = *(const VECTOR *)(p->c + (row + r) * columns + column + v * LANES); \
        else sum[r][v] = (VECTOR){0} + (p->c ? p->c[row + r] : 0);                                   \
      }                                                                                              \
    for (int64_t k = 0; k < depth; ++k, x += columns) {                                              \
      VECTOR at[VECTORS];                                                                            \
      _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) at[v] = *(const VECTOR *)(x + v * LANES); \
      _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)                                        \
        _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) sum[r][v] += w[r * depth + k] * at[v]; \
    }                                                                                                \
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)                                          \
      _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v)                                      \
        *(VECTOR *)(p->y + (row + r) * columns + column + v * LANES) = sum[r][v];                    \
  }

/* Blocks of rows, and single rows for what is left of them. */
#define BLOCKS(name, VECTOR, ROWS, VECTORS) \
  BLOCK(name, VECTOR, ROWS, VECTORS)        \
  BLOCK(name##_row, VECTOR, 1, VECTORS)

enum { ROWS = 8 }; /* of more the runs of w, where its rows are a power of two, are too many for the ways of a cache */
#if defined(__AVX512F__)
enum { WIDE_ROWS = ROWS, WIDEST = 16 };
BLOCKS(wide, Vector16, WIDE_ROWS, 2)
BLOCKS(block_16, Vector16, ROWS, 1)
#else
enum { WIDE_ROWS = 4, WIDEST = 8 };
BLOCKS(wide, Vector8, WIDE_ROWS, 2)
#endif
BLOCKS(block_8, Vector8, ROWS, 1)
BLOCKS(block_4, Vector4, ROWS, 1)

enum { PART = 512 }; /* of a column, which one that is read in strides is copied to */

/* One column, for which a row of w is a run of products to be summed up. */
static void column_of_product(const Product *p, int64_t column, int64_t first, int64_t last) {
  float part[PART];
  for (int64_t row = first; row < last; ++row) {
    const float *c = p->c_is_wide ? p->c + row * p->columns + column : p->c + row;
    p->y[row * p->columns + column] = p->c ? *c : 0;
  }
  for (int64_t start = 0; start < p->depth; start += PART) {
    const int64_t size = p->depth - start < PART ? p->depth - start : PART;
    for (int64_t k = 0; k < size; ++k) part[k] = p->x[(start + k) * p->columns + column];
    for (int64_t row = first; row < last; ++row) {
      const float *w = p->w + row * p->depth + start;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < size; ++k) sum += w[k] * part[k];
      p->y[row * p->columns + column] += sum;
    }
  }
}

END_CONTRACTED

typedef void Block(const Product *p, int64_t row, int64_t column);

static void rows_of_product(const Product *p, int64_t column, int64_t first, int64_t last, Block *block, int64_t rows,
                            Block *row) {
  for (; first + rows <= last; first += rows) block(p, first, column);
  for (; first < last; ++first) row(p, first, column);
}

/* The widest vectors that there are columns for; where they do not divide these, some columns are made twice. */
static void product(const Product *p, int64_t first, int64_t last) {
  const int64_t columns = p->columns, lanes = columns < 8 ? 4 : columns < WIDEST ? 8 : WIDEST;
  int64_t column = 0;
  if (columns < 4) {
    for (; column < columns; ++column) column_of_product(p, column, first, last);
    return;
  }
  for (; columns - column >= 2 * WIDEST; column += 2 * WIDEST)
    rows_of_product(p, column, first, last, wide, WIDE_ROWS, wide_row);
  while (column < columns) {
    if (columns - column < lanes) column = columns - lanes;
#if defined(__AVX512F__)
    if (lanes == 16) rows_of_product(p, column, first, last, block_16, ROWS, block_16_row);
#endif
    if (lanes == 8) rows_of_product(p, column, first, last, block_8, ROWS, block_8_row);
    if (lanes == 4) rows_of_product(p, column, first, last, block_4, ROWS, block_4_row);
    column += lanes;
  }
}

/* -- the loop -------------------------------------------------------------------------------------------------------- */

typedef struct {
  const Loop *loop;
  const void *in[MOST_TENSORS]; /* as a whole */
  void *out[MOST_TENSORS];
  float *made, *states; /* what lies between stages; the states of even and of odd times */
  int64_t in_bytes[MOST_TENSORS], out_bytes[MOST_TENSORS]; /* of one time */
  int64_t times, columns, done_at_end;
  atomic_llong arrived, done; /* threads; chunks of all steps */
  struct {
    _Alignas(64) atomic_llong step; /* the last one, from 1, of which this chunk is taken */
  } taken[CHUNKS];
} Work;

static int64_t rows_of_chunk(const Stage *stage, int64_t columns) {
  const int64_t unit = stage->unit ? stage->unit : 1 + LEAST_ELEMENTS / columns;
  return ((stage->rows + CHUNKS - 1) / CHUNKS + unit - 1) / unit * unit;
}

static int64_t chunks_of(const Stage *stage, int64_t columns) {
  const int64_t rows = rows_of_chunk(stage, columns);
  return (stage->rows + rows - 1) / rows;
}

static void find_frame(const Work *work, int64_t time, Frame *frame) {
  const Loop *loop = work->loop;
  int64_t state_at = 0;
  for (int i = 0; i < loop->slices; ++i) {
    const int64_t at = loop->reversed[i] ? work->times - 1 - time : time;
    frame->in[loop->states + i] = (const char *)work->in[loop->states + i] + at * work->in_bytes[loop->states + i];
  }
  for (int i = 0; i < loop->made_slices; ++i) {
    const int64_t at = loop->reversed[loop->slices + i] ? work->times - 1 - time : time;
    frame->out[loop->states + i] = (char *)work->out[loop->states + i] + at * work->out_bytes[loop->states + i];
  }
  for (int i = 0; i < loop->states; ++i) { /* two places for each: a step writes the one that it does not read */
    const int64_t size = loop->out_rows[i] * work->columns;
    frame->in[i] = time ? work->states + state_at + (time - 1) % 2 * size : work->in[i];
    frame->out[i] = time + 1 < work->times ? work->states + state_at + time % 2 * size : work->out[i];
    state_at += 2 * size;
  }
}

static void pause_a_little(int round) {
  if (round % 64 == 63) sched_yield(); /* another process may have its processor: 91 -> 56 ms a step of three LSTMs at once */
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

/* Take part, from the step that the others are at to the last one. */
static void take_part(void *data, size_t index) {
  Work *work = data;
  const Loop *loop = work->loop;
  if (atomic_load_explicit(&work->done, memory_order_acquire) == work->done_at_end) return;
  const int64_t number = atomic_fetch_add(&work->arrived, 1);
  Frame frame = {.made = work->made, .columns = work->columns};
  memcpy(frame.in, work->in, sizeof frame.in);
  int64_t step = 0, done = 0; /* done: when this step will be */
  for (int64_t time = 0; time < work->times; ++time) {
    find_frame(work, time, &frame);
    for (const Stage *stage = loop->stage; stage < loop->stage + loop->stages; ++stage) {
      const int64_t chunks = chunks_of(stage, work->columns), rows = rows_of_chunk(stage, work->columns);
      ++step, done += chunks;
      for (int64_t k = 0; k < chunks; ++k) { /* from both ends, so that each has the same weights at each time */
        const int64_t shifted = (k + number / 2 * 5) % chunks, chunk = number % 2 ? chunks - 1 - shifted : shifted;
        long long before = atomic_load_explicit(&work->taken[chunk].step, memory_order_relaxed);
        if (before >= step || !atomic_compare_exchange_strong(&work->taken[chunk].step, &before, step)) continue;
        const int64_t first = chunk * rows, last = first + rows;
        stage->run(&frame, first, last < stage->rows ? last : stage->rows);
        atomic_fetch_add_explicit(&work->done, 1, memory_order_release);
      }
      for (int round = 0; atomic_load_explicit(&work->done, memory_order_acquire) < done; ++round) pause_a_little(round);
    }
  }
}

/* The sizes of the inputs, all of which are looked at; see find_shape. */
static Status *find_sizes(const Kernel *kernel, const Value *const *inputs, Work *work) {
  const Loop *loop = work->loop;
  work->times = work->columns = -1;
  for (int i = 0; i < kernel->inputs; ++i) {
    int64_t sizes[MOST_AXES];
    size_t axes = 0;
    TRY(sizes_of(inputs[i], &axes, sizes));
    int fits = axes == (size_t)loop->axes[i];
    work->in_bytes[i] = bytes_of(kernel->input_types[i]);
    for (int k = 0; fits && k < (int)axes; ++k) {
      int64_t wanted = loop->sizes[3 * i + k];
      if (wanted == TIMES || wanted == COLUMNS) {
        int64_t *size = wanted == TIMES ? &work->times : &work->columns;
        if (*size < 0) *size = sizes[k];
        wanted = *size;
      }
      fits = sizes[k] == wanted;
      if (loop->sizes[3 * i + k] != TIMES) work->in_bytes[i] *= wanted;
    }
    if (!fits) return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  }
  return NULL;
}

static Status *run_loop(const Kernel *kernel, Context *context) {
  const Loop *loop = kernel->loop;
  Work work = {.loop = loop};
  const Value *inputs[MOST_TENSORS];
  for (int i = 0; i < kernel->inputs; ++i) {
    TRY(GET_INPUT(api)(context, i, &inputs[i]));
    TRY(GET_DATA(api)((Value *)inputs[i], (void **)&work.in[i]));
  }
  TRY(find_sizes(kernel, inputs, &work));
  int64_t rows = loop->made_rows;
  for (int i = 0; i < kernel->outputs; ++i) {
    const int is_state = i < loop->states;
    const int64_t shape[] = {work.times, loop->out_rows[i], work.columns};
    Value *output;
    TRY(GET_OUTPUT(api)(context, i, shape + is_state, 3 - is_state, &output));
    TRY(GET_DATA(api)(output, &work.out[i]));
    work.out_bytes[i] = loop->out_rows[i] * work.columns * bytes_of(kernel->output_types[i]);
    if (is_state) rows += 2 * loop->out_rows[i];
    if (is_state && !work.times) memcpy(work.out[i], work.in[i], work.out_bytes[i]);
  }
  if (!work.times || !work.columns) return NULL;
  float *room = malloc(rows * work.columns * sizeof *room + 64);
  if (!room) return CREATE_STATUS(api)(FAIL, "out of memory");
  work.made = (float *)(((uintptr_t)room + 63) & ~(uintptr_t)63);
  work.states = work.made + loop->made_rows * work.columns;
  for (int k = 0; k < loop->stages; ++k) work.done_at_end += work.times * chunks_of(&loop->stage[k], work.columns);
  Status *status = NULL;
  if (loop->multiplications * work.columns < ALONE) take_part(&work, 0);
  else status = PARALLEL_FOR(api)(context, take_part, CHUNKS, 0, &work);
  free(room);
  return status;
}
