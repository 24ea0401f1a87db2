/* Rows that are added to a table at places, some of them more than once: the gradient of an embedding.

   Each thread adds what belongs to its own rows of the table, in the order of the places, which is that of ONNX Runtime's
   ScatterElements: the same bits with any number of threads. */

#define ROWS_CHUNKS 16
#define ROWS_ALONE 32768 /* elements that one thread writes sooner than it shares them */

typedef struct {
  const int64_t *places;
  const float *added, *table; /* table: none where it is zeros */
  float *sum;
  int64_t count, stride, rows, width, rows_of_chunk; /* stride: of the places, 0 where one is for all rows */
} Rows;

static void add_to_chunk(void *data, size_t chunk) {
  const Rows *r = data;
  const int64_t first = (int64_t)chunk * r->rows_of_chunk, width = r->width;
  const int64_t last = first + r->rows_of_chunk < r->rows ? first + r->rows_of_chunk : r->rows;
  if (first >= last) return;
  const size_t bytes = (last - first) * width * sizeof(float);
  if (!r->table) memset(r->sum + first * width, 0, bytes);
  else if (r->table != r->sum) memcpy(r->sum + first * width, r->table + first * width, bytes);
  for (int64_t k = 0; k < r->count; ++k) {
    const int64_t given = r->places[k * r->stride], place = given < 0 ? given + r->rows : given;
    if (place < first || place >= last) continue;
    float *sum = r->sum + place * width;
    const float *added = r->added + k * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) sum[i] += added[i];
  }
}

/* Inputs: the table, or its shape where it is zeros, as int64; places, int64; rows. */
static Status *add_rows(const Kernel *kernel, Context *context) {
  const void *data[3];
  int64_t sizes[3][MOST_AXES], total = 1;
  size_t axes[3];
  for (int i = 0; i < 3; ++i) TRY(read_input(context, i, &data[i], &axes[i], sizes[i]));
  const int is_table = kernel->input_types[0] == FLOAT;
  const int64_t *shape = is_table ? sizes[0] : data[0];
  const size_t rank = is_table ? axes[0] : axes[0] == 1 ? (size_t)sizes[0][0] : 0;
  int fits = rank > 0 && rank <= MOST_AXES && axes[2] == rank && axes[1] <= MOST_AXES;
  for (size_t k = 1; fits && k < rank; ++k) fits = sizes[2][k] == shape[k];
  for (size_t k = 0; fits && k < axes[1]; ++k) total *= sizes[1][k];
  if (!fits || (total != sizes[2][0] && total != 1) || shape[0] < 0)
    return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  Rows rows = {.places = data[1], .added = data[2], .table = is_table ? data[0] : NULL, .rows = shape[0]};
  rows.count = sizes[2][0], rows.stride = total == rows.count, rows.width = 1;
  for (size_t k = 1; k < rank; ++k) rows.width *= shape[k];
  for (int64_t k = 0; k < total && rows.count; ++k)
    if (rows.places[k] < -rows.rows || rows.places[k] >= rows.rows)
      return CREATE_STATUS(api)(INVALID_ARGUMENT, "indices element out of data bounds");
  Value *output;
  TRY(GET_OUTPUT(api)(context, 0, shape, rank, &output));
  TRY(GET_DATA(api)(output, (void **)&rows.sum));
  if (!rows.rows || !rows.width) return NULL;
  const int64_t chunks = (rows.rows + rows.count) * rows.width < ROWS_ALONE || rows.rows < ROWS_CHUNKS ? 1 : ROWS_CHUNKS;
  rows.rows_of_chunk = (rows.rows + chunks - 1) / chunks;
  if (chunks > 1) return PARALLEL_FOR(api)(context, add_to_chunk, chunks, 0, &rows);
  add_to_chunk(&rows, 0);
  return NULL;
}

static size_t table_inplace(int **inputs, int **outputs) {
  static int first[] = {0};
  *inputs = *outputs = first;
  return 1;
}
