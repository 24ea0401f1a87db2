/* Products of matrices: y [rows, columns] = a [rows, depth] b [depth, columns], or with b given turned, [columns, depth].

   Blocks of y are summed up in registers, eight rows by the columns of three vectors: numbers of the one factor times
   vectors of the other. Numbers are read as they lie, a row in one run. Vectors are laid side by side before, panels of
   the columns of three. Of few rows of a it is a thread's own panels of b that lie side by side, as large as they may be,
   and b is read from memory once. Else all of b do first; and of a, where b is turned: then its rows have the numbers, and
   what comes out is y turned, which is turned back before it leaves the cache. */

#define DEPTH_BLOCK 512     /* of a panel: what lies side by side stays in the second cache */
#define FEW_ROWS 256        /* of a */
#define PANELS_OF_CHUNK 2   /* a thread's own: longer runs of b */
#define ROWS_OF_CHUNK 48    /* of numbers, where all vectors lie side by side */
#define PANELS_TOGETHER 6   /* that these rows are multiplied with */

BEGIN_CONTRACTED

#if defined(__AVX512F__)
typedef Vector16 Wide;
enum { LANES = 16, TILE_ROWS = 8 };
#else
typedef Vector8 Wide;
enum { LANES = 8, TILE_ROWS = 4 };
#endif
enum { TILE_VECTORS = 3, PANEL = TILE_VECTORS * LANES };

/* numbers: rows of them, `depth_line` apart; vectors: side by side, PANEL numbers to each place of the depth; y: rows `line` apart.
   ahead: what is read next, in lines of the cache: one for each block of rows, `ahead_lines` of them, at each place,
   `ahead_line` apart. */
typedef struct {
  const float *numbers, *vectors;
  float *y;
  int64_t depth_line, depth, line;
  int adds; /* to what is in y */
  const float *ahead;
  int64_t ahead_line, ahead_lines;
} Tile;

#define TILE_OF(name, ROWS, VECTORS)                                                                                   \
  static void name(const Tile *t) {                                                                                    \
    const float *numbers = t->numbers, *vectors = t->vectors, *ahead = t->ahead;                                       \
    const int64_t row = t->depth_line, line = t->line, ahead_line = t->ahead_line;                                     \
    Wide sum[ROWS][VECTORS];                                                                                           \
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)                                                             \
      _Pragma("GCC unroll 3") for (int v = 0; v < VECTORS; ++v)                                                        \
        sum[r][v] = t->adds ? *(const Wide *)(t->y + r * line + v * LANES) : (Wide){0};                                \
    for (int64_t k = t->depth; k > 0; --k, ++numbers, vectors += PANEL, ahead += ahead_line) {                         \
      Wide at[VECTORS];                                                                                                \
      __builtin_prefetch(ahead, 0, 2);                                                                                 \
      _Pragma("GCC unroll 3") for (int v = 0; v < VECTORS; ++v) at[v] = *(const Wide *)(vectors + v * LANES);          \
      _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)                                                           \
        _Pragma("GCC unroll 3") for (int v = 0; v < VECTORS; ++v) sum[r][v] += numbers[r * row] * at[v];               \
    }                                                                                                                  \
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; ++r)                                                             \
      _Pragma("GCC unroll 3") for (int v = 0; v < VECTORS; ++v) *(Wide *)(t->y + r * line + v * LANES) = sum[r][v];    \
  }
#define TILES_OF(ROWS) TILE_OF(tile_##ROWS##_1, ROWS, 1) TILE_OF(tile_##ROWS##_2, ROWS, 2) TILE_OF(tile_##ROWS##_3, ROWS, 3)
TILES_OF(8) TILES_OF(4) TILES_OF(2) TILES_OF(1)

END_CONTRACTED

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t parts_of(int64_t size, int64_t chunk) { return (size + chunk - 1) / chunk; }
static int vectors_of(int64_t columns) { return (int)parts_of(least(columns, PANEL), LANES); }

/* Rows of numbers with the vectors of one panel that `columns` fill. */
static void multiply_rows(Tile t, int64_t rows, int64_t columns) {
  static void (*const tiles[][TILE_VECTORS])(const Tile *) = {{tile_1_1, tile_1_2, tile_1_3},
                                                              {tile_2_1, tile_2_2, tile_2_3},
                                                              {tile_4_1, tile_4_2, tile_4_3},
                                                              {tile_8_1, tile_8_2, tile_8_3}};
  const int vectors = vectors_of(columns);
  for (int size = TILE_ROWS, k = TILE_ROWS == 8 ? 3 : 2; rows > 0; size /= 2, --k)
    for (; rows >= size; rows -= size) {
      tiles[k][vectors - 1](&t);
      t.numbers += size * t.depth_line, t.y += size * t.line;
      if (--t.ahead_lines > 0) t.ahead += LANES;
      else t.ahead = t.numbers, t.ahead_line = 0;
    }
}

static void copy_rows(const float *from, int64_t from_line, int64_t rows, int64_t columns, float *to, int64_t to_line) {
  for (int64_t r = 0; r < rows; ++r) memcpy(to + r * to_line, from + r * from_line, columns * sizeof(float));
}

/* Some columns of b, side by side; zeros behind the last, up to a whole vector. */
static void lay_columns(const float *b, int64_t line, int64_t depth, int64_t columns, float *out) {
  if (columns >= PANEL)
    for (int64_t k = 0; k < depth; ++k, b += line, out += PANEL)
      _Pragma("GCC unroll 3") for (int v = 0; v < TILE_VECTORS; ++v)
        *(Wide *)(out + v * LANES) = *(const Wide *)(b + v * LANES);
  else {
    const int64_t rest = vectors_of(columns) * LANES - columns;
    for (int64_t k = 0; k < depth; ++k, b += line, out += PANEL) {
      memcpy(out, b, columns * sizeof(float));
      memset(out + columns, 0, rest * sizeof(float));
    }
  }
}

typedef struct {
  const float *a, *b;
  float *y, *laid; /* laid: all vectors, side by side, where they are for all threads */
  int64_t rows, columns, depth, chunks; /* chunks: of rows of numbers, where there is `laid` */
  int turned;
  _Atomic int failed;
} Matrices;

/* Few rows of a with some panels of columns, which are laid side by side for them. While they are multiplied with, what is
   to be laid next is fetched: the same columns further down, or those of the next chunk, which the same thread has, as a rule. */
static void multiply_columns(void *data, size_t index) {
  Matrices *m = data;
  const int64_t chunk = PANELS_OF_CHUNK * PANEL, first = (int64_t)index * chunk;
  const int64_t columns = least(m->columns - first, chunk), size = least(m->depth, DEPTH_BLOCK);
  float *const own = take_scratch(chunk * size + FEW_ROWS * PANEL);
  if (!own) {
    m->failed = 1;
    return;
  }
  float *const edge = own + chunk * size; /* of y, where whole vectors would reach beyond its rows */
  for (int64_t start = 0; start == 0 || start < m->depth; start += DEPTH_BLOCK) {
    const int64_t depth = least(m->depth - start, DEPTH_BLOCK);
    for (int64_t column = 0; column < columns; column += PANEL)
      lay_columns(m->b + start * m->columns + first + column, m->columns, depth, columns - column, own + column * size);
    for (int64_t column = 0; column < columns; column += PANEL) {
      const int64_t width = least(columns - column, PANEL);
      float *const y = m->y + first + column;
      Tile t = {m->a + start, own + column * size, y, m->depth, depth, m->columns, start > 0, m->a};
      if (width % LANES) {
        t.y = edge, t.line = PANEL;
        if (start) copy_rows(y, m->columns, m->rows, width, edge, PANEL);
      }
      if (column == 0 && (start + depth < m->depth || first + 2 * chunk <= m->columns)) {
        t.ahead = m->b + first + (start + depth < m->depth ? (start + depth) * m->columns : chunk);
        t.ahead_line = m->columns, t.ahead_lines = chunk / LANES;
      }
      multiply_rows(t, m->rows, width);
      if (width % LANES) copy_rows(edge, PANEL, m->rows, width, y, m->columns);
    }
  }
  give_scratch(own);
}

#if defined(__AVX512F__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TURNS_SQUARES
/* Of each two rows that are so far apart, the blocks of that size off the diagonal are exchanged. */
#define EXCHANGE(DISTANCE, LOW, HIGH)                                                                                  \
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; ++i) if (!(i & DISTANCE)) {                                      \
    const Wide low = x[i], high = x[i + DISTANCE];                                                                     \
    x[i] = __builtin_shufflevector(low, high, LOW), x[i + DISTANCE] = __builtin_shufflevector(low, high, HIGH);        \
  }
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

static void turn_square(const float *from, int64_t from_line, float *to, int64_t to_line) {
  Wide x[LANES];
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; ++i) x[i] = *(const Wide *)(from + i * from_line);
  EXCHANGE(1, LOW_1, HIGH_1) EXCHANGE(2, LOW_2, HIGH_2) EXCHANGE(4, LOW_4, HIGH_4) EXCHANGE(8, LOW_8, HIGH_8)
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; ++i) *(Wide *)(to + i * to_line) = x[i];
}
#endif
#endif

/* Rows of `from` become columns. */
static void turn(const float *from, int64_t from_line, int64_t rows, int64_t columns, float *to, int64_t to_line) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES) {
      const int64_t some = least(rows - r, LANES), others = least(columns - c, LANES);
#ifdef TURNS_SQUARES
      if (some == LANES && others == LANES) {
        turn_square(from + r * from_line + c, from_line, to + c * to_line + r, to_line);
        continue;
      }
#endif
      for (int64_t i = 0; i < some; ++i)
        for (int64_t j = 0; j < others; ++j) to[(c + j) * to_line + r + i] = from[(r + i) * from_line + c + j];
    }
}

/* A panel for all threads: of rows of a, or of columns of b. */
static void lay_panel(void *data, size_t panel) {
  const Matrices *m = data;
  const int64_t first = (int64_t)panel * PANEL, width = (m->turned ? m->rows : m->columns) - first;
  float *const out = m->laid + first * m->depth;
  if (!m->turned) {
    lay_columns(m->b + first, m->columns, m->depth, width, out);
    return;
  }
  if (width < PANEL) memset(out, 0, PANEL * m->depth * sizeof(float));
  turn(m->a + first * m->depth, m->depth, least(width, PANEL), m->depth, out, PANEL);
}

/* Some rows of numbers with some of the panels that are laid for all. */
static void multiply_panels(void *data, size_t index) {
  Matrices *m = data;
  const int64_t line = PANELS_TOGETHER * PANEL, row = index % m->chunks * ROWS_OF_CHUNK, first = index / m->chunks * line;
  const int64_t rows = least((m->turned ? m->columns : m->rows) - row, ROWS_OF_CHUNK);
  const int64_t width = least((m->turned ? m->rows : m->columns) - first, line);
  const int64_t whole = m->turned ? 0 : width % LANES ? width / PANEL * PANEL : width; /* that tiles write to y */
  const float *numbers = (m->turned ? m->b : m->a) + row * m->depth;
  float *const own = take_scratch(ROWS_OF_CHUNK * line), *const y = m->y + row * m->columns + first;
  if (!own) {
    m->failed = 1;
    return;
  }
  for (int64_t start = 0; start == 0 || start < m->depth; start += DEPTH_BLOCK)
    for (int64_t at = 0; at < width; at += PANEL) {
      Tile t = {.numbers = numbers + start, .vectors = m->laid + (first + at) * m->depth + start * PANEL, .y = own + at,
                .depth_line = m->depth, .depth = least(m->depth - start, DEPTH_BLOCK), .line = line, .adds = start > 0,
                .ahead = numbers};
      if (at < whole) t.y = y + at, t.line = m->columns;
      multiply_rows(t, rows, width - at);
    }
  if (m->turned) turn(own, line, rows, width, m->y + first * m->columns + row, m->columns);
  else copy_rows(own + whole, line, rows, width - whole, y + whole, m->columns);
  give_scratch(own);
}

/* Inputs: a, whose axes but the last are rows, and b, a matrix. Outputs: y, and memory for what is laid side by side for all
   threads, which nobody reads: ONNX Runtime keeps its memory, where malloc may get that of each call from the system anew. */
static Status *multiply(const Kernel *kernel, Context *context, int turned) {
  const float *data[2];
  int64_t sizes[2][MOST_AXES];
  size_t axes[2];
  for (int i = 0; i < 2; ++i) TRY(read_input(context, i, &data[i], &axes[i], sizes[i]));
  const size_t last = axes[0] - 1;
  if (axes[0] < 2 || axes[0] > MOST_AXES || axes[1] != 2 || sizes[0][last] != sizes[1][turned])
    return CREATE_STATUS(api)(INVALID_ARGUMENT, "the sizes of the inputs do not go together");
  Matrices m = {.a = data[0], .b = data[1], .rows = 1, .columns = sizes[1][!turned], .depth = sizes[0][last], .turned = turned};
  for (size_t k = 0; k < last; ++k) m.rows *= sizes[0][k];
  sizes[0][last] = m.columns;
  Value *output;
  TRY(GET_OUTPUT(api)(context, 0, sizes[0], axes[0], &output));
  TRY(GET_DATA(api)(output, (void **)&m.y));
  const int own_panels = !turned && m.rows <= FEW_ROWS;
  const int64_t across = turned ? m.rows : m.columns, panels = parts_of(across, PANEL);
  const int64_t laid = own_panels ? 0 : panels * PANEL * m.depth;
  TRY(GET_OUTPUT(api)(context, 1, &laid, 1, &output));
  if (!m.rows || !m.columns) return NULL;
  Status *status = NULL;
  if (own_panels) {
    status = PARALLEL_FOR(api)(context, multiply_columns, parts_of(m.columns, PANELS_OF_CHUNK * PANEL), 0, &m);
  } else {
    TRY(GET_DATA(api)(output, (void **)&m.laid));
    m.chunks = parts_of(turned ? m.columns : m.rows, ROWS_OF_CHUNK);
    status = PARALLEL_FOR(api)(context, lay_panel, panels, 0, &m);
    if (!status) status = PARALLEL_FOR(api)(context, multiply_panels, m.chunks * parts_of(across, PANELS_TOGETHER * PANEL), 0, &m);
  }
  return !status && m.failed ? CREATE_STATUS(api)(FAIL, "out of memory") : status;
}

static Status *multiply_plain(const Kernel *kernel, Context *context) { return multiply(kernel, context, 0); }
static Status *multiply_by_turned(const Kernel *kernel, Context *context) { return multiply(kernel, context, 1); }
