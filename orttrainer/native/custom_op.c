/* Operators of ONNX Runtime from a table of kernels; what is generated defines KERNELS and stands behind this file.

   ONNX Runtime ships no headers with its Python packages. The two structures below are those of its C API, which only
   ever grows at its end: the functions of OrtApi by their place in it, and OrtCustomOp as of version 18. */

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define API_VERSION 18
#define FAIL 1
#define INVALID_ARGUMENT 2
#define FLOAT 1 /* ONNX's number of the dtype */
#define MOST_TENSORS 64
#define MOST_AXES 16
#define CHUNK 32768 /* elements that one thread works on at a time */

typedef struct Status Status; /* OrtStatus; NULL: no error */
typedef struct Value Value;   /* OrtValue */
typedef struct Context Context;
typedef struct Shape Shape; /* OrtTensorTypeAndShapeInfo */

typedef struct {
  const void *function[275];
} Api;

typedef struct {
  const Api *(*get_api)(uint32_t version);
  const char *(*get_version)(void);
} ApiBase;

#define CALL(api, index, result, ...) ((result(*) __VA_ARGS__)(api)->function[index])
#define CREATE_STATUS(api) CALL(api, 0, Status *, (int, const char *))
#define CREATE_DOMAIN(api) CALL(api, 26, Status *, (const char *, void **))
#define ADD_TO_DOMAIN(api) CALL(api, 27, Status *, (void *, const void *))
#define ADD_DOMAIN(api) CALL(api, 28, Status *, (void *, void *))
#define GET_DATA(api) CALL(api, 51, Status *, (Value *, void **))
#define GET_RANK(api) CALL(api, 61, Status *, (const Shape *, size_t *))
#define GET_SIZES(api) CALL(api, 62, Status *, (const Shape *, int64_t *, size_t))
#define GET_SHAPE(api) CALL(api, 65, Status *, (const Value *, Shape **))
#define GET_INPUT(api) CALL(api, 90, Status *, (const Context *, size_t, const Value **))
#define GET_OUTPUT(api) CALL(api, 91, Status *, (Context *, size_t, const int64_t *, size_t, Value **))
#define RELEASE_SHAPE(api) CALL(api, 99, void, (Shape *))
#define PARALLEL_FOR(api) CALL(api, 274, Status *, (const Context *, void (*)(void *, size_t), size_t, size_t, void *))

/* Between these a product is added without rounding it first. */
#if defined(__clang__)
#define BEGIN_CONTRACTED _Pragma("clang fp contract(fast)")
#define END_CONTRACTED _Pragma("clang fp contract(off)")
#else
#define BEGIN_CONTRACTED _Pragma("GCC push_options") _Pragma("GCC optimize(\"fp-contract=fast\")")
#define END_CONTRACTED _Pragma("GCC pop_options")
#endif

#define TRY(expression)            \
  do {                             \
    Status *status = (expression); \
    if (status) return status;     \
  } while (0)

/* How a kernel slides over images; sizes along the axes, `begin` and `end` are pads. block: of channels.
   has_bias, has_sum, relu: what a convolution adds, and whether it activates.
   by_tiles: sums up weights as winograd.c does, where the window is one that it can. */
typedef struct Window {
  int block, kernel[3], strides[3], dilations[3], begin[3], end[3], has_bias, has_sum, relu;
  void (*by_tiles)(void *data, size_t index);
} Window;

/* One kernel: what it computes is a loop over the axes of its outputs, which all have one shape but for sums.

   input_types, output_types: ONNX's numbers of the dtypes.
   sums: how many of the outputs, the last ones, are sums, of rank 0; `run` gives a part of each for each chunk.
   axes: how many the other outputs have.
   input_axes: how many each input has; they are the last ones of the outputs.
   long_axes: for each input the axes of the outputs, as bits, along which it is as long as they are; along others it is 1.
   loops: neighbouring axes along which all inputs behave alike are one loop; loop_of[k] is that of axis k.
   inplace: gives how many outputs may be written over an input that nobody reads later, and lists both.
   run: for the rows first to last, or for the elements where there is one loop, which are chunk number `chunk`; `size`
   holds the lengths of the loops.
   other: what computes an operator of another kind, see loops.c, rows.c, weights.c, winograd.c, pools.c; only names and types are given then.
   loop: of a loop over time.
   window: of a convolution. */
typedef struct Kernel {
  const char *name;
  int inputs, outputs;
  const int *input_types, *output_types;
  int sums, axes;
  const int *input_axes, *long_axes;
  int loops;
  const int *loop_of;
  size_t (*inplace)(int **inputs, int **outputs);
  void (*run)(const void *const *in, void *const *out, const int64_t *size, int64_t first, int64_t last, size_t chunk);
  Status *(*other)(const struct Kernel *kernel, Context *context);
  const struct Loop *loop;
  const Window *window;
} Kernel;

typedef struct Op {
  uint32_t version;
  void *(*create)(const struct Op *, const Api *, const void *);
  const char *(*get_name)(const struct Op *);
  const char *(*get_provider)(const struct Op *);
  int (*get_input_type)(const struct Op *, size_t);
  size_t (*count_inputs)(const struct Op *);
  int (*get_output_type)(const struct Op *, size_t);
  size_t (*count_outputs)(const struct Op *);
  void (*compute)(void *, Context *);
  void (*destroy)(void *);
  int (*get_input_kind)(const struct Op *, size_t);
  int (*get_output_kind)(const struct Op *, size_t);
  int (*get_input_memory)(const struct Op *, size_t);
  int (*variadic[4])(const struct Op *);
  Status *(*create_v2)(const struct Op *, const Api *, const void *, void **);
  Status *(*compute_v2)(void *, Context *);
  Status *(*infer_shape)(const struct Op *, void *);
  int (*get_start_version)(const struct Op *);
  int (*get_end_version)(const struct Op *);
  size_t (*get_inplace)(int **, int **);
  void (*release_inplace)(int *, int *);
  void *alias[2];
  const Kernel *kernel;
} Op;

typedef struct {
  const Kernel *kernel;
  const void *in[MOST_TENSORS];
  void *out[MOST_TENSORS];
  int64_t size[MOST_AXES], total, chunk;
} Run;

static const Api *api;

/* Memory of threads for the time of a chunk. It is kept for the next one: malloc gives what is this large back to the system,
   to get it anew, page by page, at the next call. */
#define KEPT_SCRATCH 64 /* threads that it is kept for */
#define ALIGNMENT 64    /* bytes */

static _Atomic(int64_t *) scratch[KEPT_SCRATCH]; /* the size stands before each */

static float *take_scratch(int64_t floats) {
  const int64_t bytes = (floats * (int64_t)sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  int64_t *found = NULL;
  for (int i = 0; i < KEPT_SCRATCH && !found; ++i)
    if (scratch[i]) found = atomic_exchange(&scratch[i], NULL);
  if (found && *found < bytes) free(found), found = NULL;
  if (!found && (found = aligned_alloc(ALIGNMENT, ALIGNMENT + bytes))) *found = bytes;
  return found ? (float *)((char *)found + ALIGNMENT) : NULL;
}

static void give_scratch(float *taken) {
  int64_t *const given = (int64_t *)((char *)taken - ALIGNMENT);
  for (int i = 0; i < KEPT_SCRATCH; ++i) {
    int64_t *none = NULL;
    if (atomic_compare_exchange_strong(&scratch[i], &none, given)) return;
  }
  free(given);
}

__attribute__((destructor)) static void free_scratch(void) {
  for (int i = 0; i < KEPT_SCRATCH; ++i) free(atomic_exchange(&scratch[i], NULL));
}

static void run_chunk(void *data, size_t index) {
  const Run *run = data;
  int64_t first = (int64_t)index * run->chunk, last = first + run->chunk;
  run->kernel->run(run->in, run->out, run->size, first, last < run->total ? last : run->total, index);
}

/* `sizes` has room for MOST_AXES; of more axes it has none. */
static Status *sizes_of(const Value *value, size_t *axes, int64_t *sizes) {
  Shape *shape;
  TRY(GET_SHAPE(api)(value, &shape));
  Status *status = GET_RANK(api)(shape, axes);
  if (!status && *axes <= MOST_AXES) status = GET_SIZES(api)(shape, sizes, *axes);
  RELEASE_SHAPE(api)(shape);
  return status;
}

/* Where an input lies, for the pointer at `data`; how many axes it has, and their lengths, as `sizes_of` gives them. */
static Status *read_input(const Context *context, int index, void *data, size_t *axes, int64_t *sizes) {
  const Value *input;
  TRY(GET_INPUT(api)(context, index, &input));
  TRY(GET_DATA(api)((Value *)input, (void **)data));
  return sizes_of(input, axes, sizes);
}

/* The lengths of the axes of the outputs, from those of the inputs, all of which are looked at: a kernel that believed
   what the graph says of its shapes would read beyond its inputs where a batch is not as the graph says. */
static Status *find_shape(const Kernel *kernel, const Value *const *inputs, int64_t *shape) {
  for (int k = 0; k < kernel->axes; ++k) shape[k] = -1;
  for (int i = 0; i < kernel->inputs; ++i) {
    int64_t sizes[MOST_AXES];
    size_t axes = 0;
    TRY(sizes_of(inputs[i], &axes, sizes));
    int fits = axes == (size_t)kernel->input_axes[i];
    for (int k = kernel->axes - (int)axes; fits && k < kernel->axes; ++k) {
      int64_t size = sizes[k - (kernel->axes - (int)axes)];
      int is_long = kernel->long_axes[i] >> k & 1;
      if (is_long && shape[k] < 0) shape[k] = size;
      fits = size == (is_long ? shape[k] : 1);
    }
    if (!fits) return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  }
  return NULL;
}

static void add_up(const void *parts, int64_t count, int type, void *sum) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += type == FLOAT ? ((const float *)parts)[i] : ((const double *)parts)[i];
  if (type == FLOAT) *(float *)sum = (float)total;
  else *(double *)sum = total;
}

static Status *compute(void *data, Context *context) {
  const Kernel *kernel = data;
  if (kernel->other) return kernel->other(kernel, context);
  Run run = {.kernel = kernel, .total = 1};
  const Value *inputs[MOST_TENSORS];
  int64_t shape[MOST_AXES];
  for (int i = 0; i < kernel->inputs; ++i) {
    TRY(GET_INPUT(api)(context, i, &inputs[i]));
    TRY(GET_DATA(api)((Value *)inputs[i], (void **)&run.in[i]));
  }
  TRY(find_shape(kernel, inputs, shape));
  for (int k = 0; k < kernel->loops; ++k) run.size[k] = 1;
  for (int k = 0; k < kernel->axes; ++k) run.size[kernel->loop_of[k]] *= shape[k];
  int64_t length = kernel->loops > 1 ? run.size[kernel->loops - 1] : 1;
  for (int k = 0; k < kernel->loops - (kernel->loops > 1); ++k) run.total *= run.size[k];
  run.chunk = length == 0 || length >= CHUNK ? 1 : CHUNK / length;
  int64_t chunks = length == 0 ? 0 : (run.total + run.chunk - 1) / run.chunk;
  void *sums[MOST_TENSORS];
  int first_sum = kernel->outputs - kernel->sums;
  for (int i = 0; i < kernel->outputs; ++i) {
    Value *output;
    TRY(GET_OUTPUT(api)(context, i, shape, i < first_sum ? kernel->axes : 0, &output));
    TRY(GET_DATA(api)(output, i < first_sum ? &run.out[i] : &sums[i - first_sum]));
  }
  double *parts = NULL; /* room for those of all sums, be they float or double */
  if (kernel->sums && !(parts = malloc((chunks * kernel->sums + 1) * sizeof *parts)))
    return CREATE_STATUS(api)(FAIL, "out of memory");
  for (int i = 0; i < kernel->sums; ++i) run.out[first_sum + i] = parts + i * chunks;
  Status *status = NULL;
  if (chunks == 1) run_chunk(&run, 0);
  if (chunks > 1) status = PARALLEL_FOR(api)(context, run_chunk, chunks, 0, &run);
  for (int i = 0; i < kernel->sums && !status; ++i)
    add_up(run.out[first_sum + i], chunks, kernel->output_types[first_sum + i], sums[i]);
  free(parts);
  return status;
}

static const char *get_name(const Op *op) { return op->kernel->name; }
static const char *get_provider(const Op *op) { return NULL; } /* the CPU */
static int get_input_type(const Op *op, size_t index) { return op->kernel->input_types[index]; }
static int get_output_type(const Op *op, size_t index) { return op->kernel->output_types[index]; }
static size_t count_inputs(const Op *op) { return op->kernel->inputs; }
static size_t count_outputs(const Op *op) { return op->kernel->outputs; }
static int zero(const Op *op, size_t index) { return 0; } /* a required tensor, in the memory of the provider */
static int one(const Op *op) { return 1; }
static int most(const Op *op) { return INT32_MAX; }
static void destroy(void *kernel) {}
static void release_inplace(int *inputs, int *outputs) {}
static Status *create(const Op *op, const Api *api, const void *info, void **kernel) {
  *kernel = (void *)op->kernel;
  return NULL;
}

/* What the operators are, once for the library: ONNX Runtime keeps pointers to them and reads them at each call, in the
   threads of other sessions too, so that nothing is written here when a session is opened. */
static void fill_ops(const Kernel *kernels, Op *ops, int count) {
  for (int i = 0; i < count; ++i)
    ops[i] = (Op){.version = API_VERSION,
                  .get_name = get_name,
                  .get_provider = get_provider,
                  .get_input_type = get_input_type,
                  .count_inputs = count_inputs,
                  .get_output_type = get_output_type,
                  .count_outputs = count_outputs,
                  .destroy = destroy,
                  .get_input_kind = zero,
                  .get_output_kind = zero,
                  .get_input_memory = zero,
                  .variadic = {one, one, one, one},
                  .create_v2 = create,
                  .compute_v2 = compute,
                  .get_start_version = one,
                  .get_end_version = most,
                  .get_inplace = kernels[i].inplace,
                  .release_inplace = release_inplace,
                  .kernel = &kernels[i]};
}

/* Add an operator for each kernel to the options of a session. */
static Status *register_ops(void *options, const ApiBase *base, const char *domain, const Op *ops, int count) {
  void *handle;
  api = base->get_api(API_VERSION);
  TRY(CREATE_DOMAIN(api)(domain, &handle));
  for (int i = 0; i < count; ++i) TRY(ADD_TO_DOMAIN(api)(handle, &ops[i]));
  return ADD_DOMAIN(api)(options, handle);
}
