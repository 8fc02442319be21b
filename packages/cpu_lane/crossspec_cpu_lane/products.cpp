// Products in float32 for the few rows that a round of decoding has, as fast as what they read can be read.
//
// `linear`: the weights are packed: slabs of `depth` columns, in them tiles of `lanes` outputs, in them one vector for
// each column. So every thread reads one stream, once, and asks for it far ahead. A tile's sums of all rows stay in
// registers, and what a slab reads of x in the first-level cache. Weights that bfloat16 holds exactly, as those of a
// checkpoint in bfloat16 do, are packed in it, two columns' in a word: half of what is read, and the same bits of y.
//
// `attend`, `attend_level`: rows of a draft tree over the paged cache, whose blocks have keys by dimension and values
// by token, so that both products read whole vectors in place. `top`: what a tree's next level is chosen from.
//
// Both may cap their logits, and have sinks: a logit more a head, without a value.
//
// Every sum adds its products in one order, whatever the number of rows and threads is: a row's results are the same
// bits in any batch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

// OpenMP's runtime, which is PyTorch's own: a second one would spin against it.
extern "C" {
void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace {

#ifdef __AVX512F__
constexpr long lanes = 16, most_rows = 24;  // 24 vectors of sums and one of weights, of 32 registers
#else
constexpr long lanes = 8, most_rows = 12;  // and one of x, of 16
#endif
constexpr long depth = 192;            // even: a word holds two columns
constexpr long panel = 32;              // blocks of rows
constexpr long chunk = 32768;           // sums of a panel, in the second-level cache
constexpr long worth_widening = 4;      // blocks of rows
constexpr long most_asking = 4;         // blocks of rows, the first ones, that ask for what the next tiles read
constexpr long far_ahead = 4096;        // floats, into the second-level cache
constexpr long ahead_by = 128;          // floats, into the first
constexpr std::size_t most_kept = 1 << 22;  // floats, of x turned and of sums
constexpr long worth_threads = 200000;  // products

typedef float vector __attribute__((vector_size(4 * lanes)));
typedef float unaligned __attribute__((vector_size(4 * lanes), aligned(4)));
using ints = int __attribute__((vector_size(4 * lanes)));
constexpr int upper_half = -65536;

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 24")
#endif

struct Slab {
    const float *x;     // [columns, rows]
    const float *w;     // [tiles, words, lanes], two words `between` apart
    const float *from;  // what is added to,
    float *to;          // and where it goes
    long words;         // a column's weight each, or the next two columns' in bfloat16, the first in the lower half
    long from_row, to_row;    // two rows' distance there,
    long from_tile, to_tile;  // and two tiles'
    const float *ahead;  // what is read next,
    long step;           // and how much of it to ask for with every word
    long between = lanes;
};

// Add one slab to the sums of a few tiles.
template <int rows, int tiles, bool halves>
void add_slab(const Slab &slab) {
    const long words = slab.words, step = slab.step, between = slab.between;
    const float *x = slab.x, *w = slab.w, *ahead = slab.ahead;
    vector sums[tiles][rows];
    UNROLL for (int tile = 0; tile < tiles; tile++) UNROLL for (int row = 0; row < rows; row++)
        sums[tile][row] =
            *reinterpret_cast<const unaligned *>(slab.from + tile * slab.from_tile + row * slab.from_row);
    for (long word = 0; word < words; word++, w += between, ahead += step) {
        __builtin_prefetch(ahead, 0, 2);
        if (tiles == 1) __builtin_prefetch(w + ahead_by, 0, 3);
        UNROLL for (int half = 0; half <= halves; half++, x += rows) {
            if (half) __asm__ volatile("" ::: "memory");  // else compilers mix both halves, and run out of registers
            vector weights[tiles];
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                const float *own = w + tile * lanes * words;
                const ints two = *reinterpret_cast<const ints *>(own);
                weights[tile] = halves ? (vector)(half ? two & upper_half : two << 16) : (vector)two;
            }
            // Rows outside: else compilers load x for all of them first, and run out of registers.
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++) sums[tile][row] += x[row] * weights[tile];
        }
    }
    UNROLL for (int tile = 0; tile < tiles; tile++) UNROLL for (int row = 0; row < rows; row++)
        *reinterpret_cast<unaligned *>(slab.to + tile * slab.to_tile + row * slab.to_row) = sums[tile][row];
}

using AddSlab = void (*)(const Slab &);
template <int tiles, bool halves, std::size_t... index>
AddSlab by_rows(std::size_t rows, std::index_sequence<index...>) {
    static constexpr AddSlab table[] = {add_slab<index + 1, tiles, halves>...};
    return table[rows - 1];
}
template <bool halves = false>
AddSlab adds(long rows, long tiles = 1) {
    return tiles == 1 ? by_rows<1, halves>(rows, std::make_index_sequence<most_rows>())
                      : by_rows<2, halves>(rows, std::make_index_sequence<most_rows / 2>());
}

constexpr float zeros[lanes] = {};

struct Product {
    const float *x, *packed, *bias;
    float *y;
    float *turned;  // x, a block's rows beside each other
    float *sums;    // [tiles, m, lanes]
    long m, n, k;
    long blocks;  // of rows, nearly of one size: one where a tile's sums fit in the registers, else for two tiles
    bool halves;  // weights are in bfloat16

    long tiles() const { return (n + lanes - 1) / lanes; }
    long first_row(long block) const { return m * block / blocks; }
    long rows(long block) const { return first_row(block + 1) - first_row(block); }

    // Turn columns `from` to `to` of x, so that a block's rows lie beside each other.
    void turn(long from, long to) const {
        for (long block = 0; block < blocks; block++) {
            const long first = first_row(block), count = rows(block);
            float *out = turned + first * k + from * count;
            for (long begin = from; begin < to; begin += lanes) {
                const long width = std::min(lanes, to - begin);
                float some[most_rows][lanes];  // all rows' lines are asked for before one is needed
                for (long row = 0; row < count; row++) {
                    const float *own = x + (first + row) * k + begin;
                    if (width == lanes)
                        std::memcpy(some[row], own, sizeof some[row]);
                    else
                        std::copy_n(own, width, some[row]);
                }
                for (long column = 0; column < width; column++)
                    for (long row = 0; row < count; row++) *out++ = some[row][column];
            }
        }
    }

    // Multiply with tiles `from` to `to`: a panel of rows, and of it so many tiles that their sums stay in the
    // second-level cache from slab to slab. Weights are read once for each panel.
    void multiply(long from, long to) const {
        const long panels = (blocks + panel - 1) / panel;
        for (long index = 0; index < panels; index++) {
            const long first = blocks * index / panels, last = blocks * (index + 1) / panels;
            const long count = first_row(last) - first_row(first), pairs = chunk / (2 * lanes * count);
            const long size = blocks > 1 ? 2 * std::max(1l, pairs) : to - from;
            for (long tile = from; tile < to; tile += size)
                for (long begin = 0; begin < k; begin += depth)
                    add(begin, std::min(depth, k - begin), first, last, tile, std::min(to, tile + size));
        }
    }

    // One slab, some blocks of rows, two tiles at a time where there are several blocks, which load x less often. Sums
    // go to y with the last slab alone: its rows are often a power of two apart, which keeps few of them in a cache.
    void add(long begin, long columns, long first_block, long last_block, long from, long to) const {
        const bool is_last = begin + columns == k, widens = halves && last_block - first_block >= worth_widening;
        const long in_a_word = 1 + halves, words = columns / in_a_word;
        const long asking = std::min(most_asking, last_block - first_block);
        for (long tile = from, at_once; tile < to; tile += at_once) {
            const long output = tile * lanes, left = n - output;
            at_once = blocks > 1 && to - tile > 1 && left >= 2 * lanes ? 2 : 1;
            const long size = at_once * lanes;
            const float *w = packed + begin / in_a_word * tiles() * lanes + output * words;
            alignas(vector) float wide[2 * lanes * depth];
            if (widens) widen(w, at_once * words, wide);
            const long step = size / asking / (1 + widens);
            float some[2 * lanes] = {};
            if (bias) std::copy_n(bias + output, std::min(left, size), some);
            for (long block = first_block; block < last_block; block++) {
                const long first = first_row(block), count = rows(block), asked = block - first_block;
                float *own = sums + (tile * m + first) * lanes, *out = y + first * n + output;
                const float *rows_of_x = turned + first * k + begin * count;
                Slab slab = {rows_of_x, w, own, own, words, lanes, lanes, m * lanes, m * lanes};
                if (widens) slab.w = wide, slab.words = columns;
                if (!begin) slab.from = some, slab.from_row = 0, slab.from_tile = lanes;
                if (is_last && left >= size) slab.to = out, slab.to_row = n, slab.to_tile = lanes;
                slab.ahead = w + (blocks > 1 ? size * words + asked * step * slab.words : far_ahead);
                slab.step = blocks > 1 && asked >= asking ? 0 : step;
                (halves && !widens ? adds<true>(count, at_once) : adds<false>(count, at_once))(slab);
                if (is_last && left < size)
                    for (long row = 0; row < count; row++) std::copy_n(own + row * lanes, left, out + row * n);
            }
        }
    }

    // Words of two columns in bfloat16 as two of floats.
    static void widen(const float *from, long words, float *to) {
        for (long word = 0; word < words; word++) {
            const ints two = reinterpret_cast<const ints *>(from)[word];
            reinterpret_cast<ints *>(to)[2 * word] = two << 16;
            reinterpret_cast<ints *>(to)[2 * word + 1] = two & upper_half;
        }
    }

    // A thread's share.
    static void work(void *argument) {
        const Product &own = *static_cast<const Product *>(argument);
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), tiles = own.tiles();
        if (own.m > 1) {
            own.turn(own.k * thread / threads, own.k * (thread + 1) / threads);
            GOMP_barrier();
        }
        own.multiply(tiles * thread / threads, tiles * (thread + 1) / threads);
    }
};

// e to the power of x, which is not positive: as Cephes has it, within two units in the last place; 0 below -87.
vector exponential(vector x) {
    const vector least = vector{} - 87.0f, round = vector{} + 12582912.0f;
    const vector inside = x < least ? least : x;
    const vector n = inside * 1.44269504f + round - round;
    const vector r = inside - n * 0.693359375f + n * 2.12194440e-4f;
    vector sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    for (const float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * r + next;
    sum = sum * r * r + r + 1.0f;
    const ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return x < least ? vector{} : sum * reinterpret_cast<const vector &>(power);
}

// The hyperbolic tangent.
vector tangent(vector x) {
    const vector size = x < vector{} ? -x : x, power = exponential(-2.0f * size);
    const vector found = (1.0f - power) / (1.0f + power);
    return x < vector{} ? -found : found;
}

// Keys that lie beside each other, and their values.
struct Span {
    const float *keys;    // [head_size, size], two dimensions `pitch` apart, readable in whole vectors
    const float *values;  // [size, head_size], two keys `value_pitch` apart
    long start, size, pitch, value_pitch;
};

// Rows of one request over its first keys, grouped-query attention: see `attend` below. The last `tail` keys may lie in
// the scratch of a drafter's trees, and those before them in the paged cache.
struct Attention {
    const float *query, *cache, *hidden;
    const int *blocks;
    float *output;
    long rows, group, kv_heads, head_size, block_size, num_keys, num_hidden;
    long query_row, query_head, cache_block, cache_head, hidden_row, output_row, output_head;
    float scale;
    const float *scratch = nullptr;  // [tail, 2, kv_heads, head_size]
    long tail = 0;
    float soft_cap = 0;            // c of c tanh(logit / c); 0: none
    const float *sinks = nullptr;  // a head's logit without a value

    // All rows of the query heads of one KV head, so many at a time that a tile's sums fit in the registers.
    void attend(long head) const {
        static thread_local std::vector<vector> room;
        const long pitch = whole(tail), all = rows * group, parts = (all + most_rows - 1) / most_rows;
        room.resize(std::max<std::size_t>(room.size(), head_size * pitch / lanes));
        float *turned = reinterpret_cast<float *>(room.data());
        for (long key = 0; key < tail; key++) {
            const float *from = scratch + (2 * key * kv_heads + head) * head_size;
            for (long d = 0; d < head_size; d++) turned[d * pitch + key] = from[d];
        }
        for (long part = 0; part < parts; part++) attend(head, turned, all * part / parts, all * (part + 1) / parts);
    }

    void attend(long head, const float *tail_keys, long first, long last) const {
        const long count = last - first;
        const long pitch = whole(num_keys) + lanes;  // else rows of many keys lie in one cache set
        static thread_local std::vector<float> room;
        room.resize(std::max<std::size_t>(room.size(), count * (2 * (head_size + pitch) + lanes)));
        float *turned = room.data(), *sums = turned + count * head_size, *shares = sums + count * head_size;
        float *logits = shares + count * pitch;
        for (long index = 0; index < count; index++) {
            const long row = (first + index) % rows, own = head * group + (first + index) / rows;
            const float *from = query + row * query_row + own * query_head;
            for (long d = 0; d < head_size; d++) turned[d * count + index] = from[d] * scale;
        }
        each_span(head, tail_keys, [&](const Span &span) {
            for (long key = 0; key < span.size; key += lanes) {
                const float *keys = span.keys + key;
                float *to = logits + span.start + key;
                adds(count)({turned, keys, zeros, to, head_size, 0, pitch, 0, 0, keys, 0, span.pitch});
            }
        });
        float factors[most_rows];
        for (long index = 0; index < count; index++) {
            const float *mask = hidden + (first + index) % rows * hidden_row;
            const float *sink = sinks ? sinks + head * group + (first + index) / rows : nullptr;
            factors[index] = share(logits + index * pitch, mask, sink);
        }
        for (long key = 0; key < num_keys; key++)
            for (long index = 0; index < count; index++) shares[key * count + index] = logits[index * pitch + key];
        each_span(head, tail_keys, [&](const Span &span) {
            const float *x = shares + span.start * count;
            for (long d = 0; d < head_size; d += lanes) {
                const float *values = span.values + d;
                Slab slab = {x, values, sums + d, sums + d, span.size, head_size, head_size, 0, 0, values, 0};
                slab.between = span.value_pitch;
                if (!span.start) slab.from = zeros, slab.from_row = 0;
                adds(count)(slab);
            }
        });
        if (!finite(sums, count * head_size)) add_what_is_seen(head, tail_keys, count, shares, sums);
        for (long index = 0; index < count; index++) {
            const long row = (first + index) % rows, own = head * group + (first + index) / rows;
            float *to = output + row * output_row + own * output_head;
            for (long d = 0; d < head_size; d++) to[d] = sums[index * head_size + d] * factors[index];
        }
    }

    // The sums once more, where values are no finite numbers: a share of 0 times NaN is NaN.
    void add_what_is_seen(long head, const float *tail_keys, long count, const float *shares, float *sums) const {
        std::fill(sums, sums + count * head_size, 0.0f);
        each_span(head, tail_keys, [&](const Span &span) {
            for (long key = 0; key < span.size; key++)
                for (long index = 0; index < count; index++) {
                    const float share = shares[(span.start + key) * count + index];
                    const float *values = span.values + key * span.value_pitch;
                    for (long d = 0; share != 0 && d < head_size; d++) sums[index * head_size + d] += share * values[d];
                }
        });
    }

    static bool finite(const float *numbers, long size) {
        vector nothing = {};
        for (long index = 0; index < size; index += lanes)
            nothing += reinterpret_cast<const unaligned &>(numbers[index]) * 0.0f;
        return total(nothing) == 0;
    }

    template <typename Function>
    void each_span(long head, const float *tail_keys, Function function) const {
        const long paged = num_keys - tail;
        for (long start = 0; start < paged; start += block_size) {
            const float *block = cache + blocks[start / block_size] * cache_block + head * cache_head;
            const long size = std::min(block_size, paged - start);
            function(Span{block, block + block_size * head_size, start, size, block_size, head_size});
        }
        const long width = kv_heads * head_size;
        if (tail) function(Span{tail_keys, scratch + width + head * head_size, paged, tail, whole(tail), 2 * width});
    }

    static long whole(long size) { return (size + lanes - 1) / lanes * lanes; }

    // Put the shares of a row's keys in the logits' place, not yet divided by their sum; returns what to multiply with.
    float share(float *logits, const float *hidden, const float *sink) const {
        const long padded = whole(num_keys);
        for (long key = 0; soft_cap && key < padded; key += lanes) {
            unaligned &some = reinterpret_cast<unaligned &>(logits[key]);
            some = soft_cap * tangent(some / soft_cap);
        }
        for (long key = 0; key < num_hidden; key++) {  // not added: a key's NaN would stay one
            float &own = logits[num_keys - num_hidden + key];
            own = hidden[key] < 0 ? -INFINITY : own;
        }
        std::fill(logits + num_keys, logits + padded, -INFINITY);
        float greatest = greatest_of(logits, padded);
        if (sink) greatest = std::max(greatest, *sink);
        const bool sees_nothing = greatest == -INFINITY;  // in vLLM's dummy runs
        vector sums = {};
        for (long key = 0; key < padded; key += lanes) {
            unaligned &some = reinterpret_cast<unaligned &>(logits[key]);
            some = sees_nothing ? vector{} : exponential(some - greatest);
            sums += some;
        }
        return sees_nothing ? 0 : 1 / (total(sums) + (sink ? std::exp(*sink - greatest) : 0));
    }

    static float greatest_of(const float *logits, long size) {
        vector most = vector{} - INFINITY;
        for (long key = 0; key < size; key += lanes) {
            const vector some = reinterpret_cast<const unaligned &>(logits[key]);
            most = some > most ? some : most;
        }
        float greatest = -INFINITY;
        for (long lane = 0; lane < lanes; lane++) greatest = std::max(greatest, most[lane]);
        return greatest;
    }

    static float total(vector sums) {
        float sum = 0;
        for (long lane = 0; lane < lanes; lane++) sum += sums[lane];
        return sum;
    }
};

// Requests of a batch, in threads by their KV heads.
struct Attentions {
    const std::vector<Attention> &requests;

    static void work(void *argument) {
        const auto &own = static_cast<const Attentions *>(argument)->requests;
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), heads = own[0].kv_heads;
        const long all = own.size() * heads;
        for (long item = all * thread / threads; item < all * (thread + 1) / threads; item++)
            own[item / heads].attend(item % heads);
    }

    void run() const {
        long products = 0;
        for (const Attention &request : requests)
            products += 2 * request.rows * request.group * request.kv_heads * request.num_keys * request.head_size;
        if (products >= worth_threads) {
            GOMP_parallel(work, const_cast<Attentions *>(this), 0, 0);
        } else {
            for (const Attention &request : requests)
                for (long head = 0; head < request.kv_heads; head++) request.attend(head);
        }
    }
};

using torch::stable::Tensor;

unsigned bits(float value) { return std::bit_cast<unsigned>(value); }

Tensor pack(Tensor weight) {
    weight = torch::stable::contiguous(weight);
    const long n = weight.size(0), k = weight.size(1);
    const float *from = static_cast<const float *>(weight.data_ptr());
    unsigned lower = 0;
    for (long index = 0; index < n * k; index++) lower |= bits(from[index]) & 0xffff;
    const bool halves = !lower && k % 2 == 0;
    const auto type = halves ? torch::headeronly::ScalarType::BFloat16 : torch::headeronly::ScalarType::Float;
    Tensor packed = torch::stable::new_empty(weight, {(n + lanes - 1) / lanes * lanes * k}, type);
    unsigned *to = static_cast<unsigned *>(packed.data_ptr());
    for (long begin = 0; begin < k; begin += depth)
        for (long tile = 0; tile < n; tile += lanes)
            for (long column = begin; column < std::min(k, begin + depth); column += 1 + halves)
                for (long lane = tile; lane < tile + lanes; lane++) {
                    const float *own = from + lane * k + column;
                    *to++ = lane >= n ? 0 : halves ? bits(own[0]) >> 16 | bits(own[1]) : bits(own[0]);
                }
    return packed;
}

Tensor linear(Tensor x, Tensor packed, int64_t outputs, std::optional<Tensor> bias) {
    if (!x.is_contiguous()) x = torch::stable::contiguous(x);
    const auto shape = x.sizes();
    std::vector<int64_t> size(shape.begin(), shape.end());
    const long k = size.back(), m = k ? x.numel() / k : 0;
    size.back() = outputs;
    Tensor y = torch::stable::new_empty(x, size);
    const long padded = (outputs + lanes - 1) / lanes * lanes;
    STD_TORCH_CHECK(
        packed.numel() == padded * k, "linear: x has ", k, " columns, and the weights of ", outputs, " outputs have ",
        packed.numel() / std::max(padded, 1l));
    STD_TORCH_CHECK(
        !bias || bias->numel() == outputs, "linear: there are ", outputs, " outputs, and a bias for ", bias->numel());
    if (m == 0) return y;
    static thread_local std::vector<float> room;
    float *from = static_cast<float *>(x.data_ptr());
    const long for_x = m > 1 ? (m * k + lanes - 1) / lanes * lanes : 0;
    room.resize(std::max<std::size_t>(room.size(), for_x + m * padded));
    Product product = {
        from,
        static_cast<const float *>(packed.data_ptr()),
        bias ? static_cast<const float *>(bias->data_ptr()) : nullptr,
        static_cast<float *>(y.data_ptr()),
        m > 1 ? room.data() : from,
        room.data() + for_x,
        m,
        outputs,
        k,
        m <= most_rows ? 1 : (m + most_rows / 2 - 1) / (most_rows / 2),
        packed.scalar_type() == torch::headeronly::ScalarType::BFloat16,
    };
    if (m * outputs * k >= worth_threads) {
        GOMP_parallel(Product::work, &product, 0, 0);
    } else {
        if (m > 1) product.turn(0, k);
        product.multiply(0, product.tiles());
    }
    if (room.size() > most_kept) std::vector<float>().swap(room);  // of a long prompt
    return y;
}

// What both kinds of attention have of their tensors; the rest is 0.
Attention attention(
    const Tensor &query, const Tensor &kv_cache, double scale, double soft_cap, const std::optional<Tensor> &sinks,
    const Tensor &output
) {
    STD_TORCH_CHECK(
        2 * query.size(2) == kv_cache.size(3) && query.size(1) % kv_cache.size(1) == 0, "attend: queries of ",
        query.size(1), " heads of ", query.size(2), ", and a cache of ", kv_cache.size(1), " of ", kv_cache.size(3) / 2);
    return {
        .query = static_cast<const float *>(query.data_ptr()),
        .cache = static_cast<const float *>(kv_cache.data_ptr()),
        .output = static_cast<float *>(output.data_ptr()),
        .rows = query.size(0),
        .group = query.size(1) / kv_cache.size(1),
        .kv_heads = kv_cache.size(1),
        .head_size = query.size(2),
        .block_size = kv_cache.size(2),
        .query_row = query.stride(0),
        .query_head = query.stride(1),
        .cache_block = kv_cache.stride(0),
        .cache_head = kv_cache.stride(1),
        .output_row = output.stride(0),
        .output_head = output.stride(1),
        .scale = static_cast<float>(scale),
        .soft_cap = static_cast<float>(soft_cap),
        .sinks = sinks ? static_cast<const float *>(sinks->data_ptr()) : nullptr,
    };
}

// Softmax of query times keys, times values.
//
// query: [rows, heads, head_size], of whole vectors; kv_cache: [blocks, kv_heads, block_size, 2 * head_size] as vLLM's
// "vec" kernels lay it out; blocks: int32, of the request; hidden: [rows, m], -inf where a row does not see one of the
// last m of `num_keys`, else 0; soft_cap: 0 for none; sinks: [heads]; output: as the query, written, zeros in a row that sees
// no key.
void attend(
    Tensor query, Tensor kv_cache, Tensor blocks, int64_t num_keys, Tensor hidden, double scale, double soft_cap,
    std::optional<Tensor> sinks, Tensor output
) {
    Attention call = attention(query, kv_cache, scale, soft_cap, sinks, output);
    call.blocks = static_cast<const int *>(blocks.data_ptr());
    call.hidden = static_cast<const float *>(hidden.data_ptr());
    call.num_hidden = hidden.size(1);
    call.hidden_row = hidden.stride(0);
    call.num_keys = num_keys;
    Attentions{{call}}.run();
}

// One level of the trees of an autoregressive drafter: `rows` query rows of each request, which see its first
// `seq_lens` tokens in the paged cache and, behind them, rows of its tree.
//
// query, output: [requests * rows or more, heads, head_size]; key, value: the level's, [.., kv_heads, head_size];
// block_table: int32 [requests or more, blocks]; scratch: [requests or more, capacity, 2, kv_heads, head_size], of the
// trees so far, into which the level is written: it ends with row `length`, and with `has_shared` its last row is row 0
// in every level; masks: int32 [requests * rows or more, words], which rows of the scratch each query row sees. With a
// window (0: none) a row sees so many tokens of its line: those that its mask has, itself the last, behind the cache's.
void attend_level(
    Tensor query, Tensor key, Tensor value, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor scratch,
    Tensor masks, int64_t requests, int64_t rows, int64_t length, bool has_shared, double scale, int64_t window,
    double soft_cap, std::optional<Tensor> sinks, Tensor output
) {
    const long capacity = scratch.size(1), width = scratch.size(3) * scratch.size(4), words = masks.size(1);
    const int *lengths = static_cast<const int *>(seq_lens.data_ptr());
    const int *bits = static_cast<const int *>(masks.data_ptr());
    const long seen = std::min<long>({length, capacity, 32 * words});
    const long block_size = kv_cache.size(2);
    std::vector<std::vector<float>> hidden(requests);
    std::vector<Attention> calls(requests, attention(query, kv_cache, scale, soft_cap, sinks, output));
    for (long request = 0; request < requests; request++) {
        float *own = static_cast<float *>(scratch.data_ptr()) + request * scratch.stride(0);
        const long cached = lengths[request];
        std::vector<long> line(rows);  // tokens of the tree that a row's mask has
        for (long place = 0; place < rows; place++)
            for (long word = 0; word < words; word++)
                line[place] += std::popcount(static_cast<unsigned>(bits[(request * rows + place) * words + word]));
        // Only a window hides anything of the cache, and what all of them hide is left out, block by block.
        const long least = *std::min_element(line.begin(), line.end());
        const long first = window ? std::clamp((cached + least - window) / block_size * block_size, 0l, cached) : 0;
        const long paged = window ? cached - first : 0, all = paged + seen;
        hidden[request].resize(rows * all);
        for (long place = 0; place < rows; place++) {
            const long index = request * rows + place, to = length - rows + place + has_shared;
            const long row = has_shared && place == rows - 1 ? 0 : to;
            for (const auto &[from, half] : {std::pair{&key, 0}, std::pair{&value, 1}}) {
                const float *start = static_cast<const float *>(from->data_ptr()) + index * from->stride(0);
                if (row < 0 || row >= capacity) continue;
                for (long head = 0; head < scratch.size(3); head++)
                    std::memcpy(own + (2 * row + half) * width + head * scratch.size(4),
                                start + head * from->stride(1), 4 * scratch.size(4));
            }
            float *mask = hidden[request].data() + place * all;
            for (long key = 0; key < paged; key++)
                mask[key] = first + key >= cached + line[place] - window ? 0 : -INFINITY;
            for (long column = 0, left = line[place]; column < seen; column++) {
                const bool has = bits[index * words + column / 32] >> column % 32 & 1;
                left -= has;
                mask[paged + column] = has && (!window || left < window) ? 0 : -INFINITY;
            }
        }
        Attention &call = calls[request];
        call.rows = rows;
        call.query += request * rows * call.query_row;
        call.output += request * rows * call.output_row;
        call.blocks = static_cast<const int *>(block_table.data_ptr()) + request * block_table.stride(0);
        call.blocks += first / block_size;
        call.hidden = hidden[request].data();
        call.num_hidden = call.hidden_row = all;
        call.tail = seen;
        call.num_keys = cached - first + seen;
        call.scratch = own;
    }
    if (requests) Attentions{calls}.run();
}

// The `k` largest of each row of logits [rows, vocabulary], falling, the first of equals first, as log-probabilities
// of the row's softmax, and where they are: int64.
std::tuple<Tensor, Tensor> top(Tensor logits, int64_t k) {
    if (!logits.is_contiguous()) logits = torch::stable::contiguous(logits);
    const long rows = logits.size(0), size = logits.size(1), even = size / lanes * lanes;
    STD_TORCH_CHECK(k >= 1 && k <= size, "top: ", k, " of ", size, " logits");
    Tensor values = torch::stable::new_empty(logits, {rows, k});
    Tensor places = torch::stable::new_empty(logits, {rows, k}, torch::headeronly::ScalarType::Long);
    for (long row = 0; row < rows; row++) {
        const float *from = static_cast<const float *>(logits.data_ptr()) + row * size;
        float *best = static_cast<float *>(values.data_ptr()) + row * k;
        int64_t *at = static_cast<int64_t *>(places.data_ptr()) + row * k;
        long found = 0;
        const auto take = [&](long place) {
            if (found == k && !(from[place] > best[k - 1])) return;
            long rank = found < k ? found++ : k - 1;
            for (; rank > 0 && from[place] > best[rank - 1]; rank--)
                best[rank] = best[rank - 1], at[rank] = at[rank - 1];
            best[rank] = from[place], at[rank] = place;
        };
        for (long place = 0; place < even; place += lanes) {
            if (found == k) {
                const ints above = reinterpret_cast<const unaligned &>(from[place]) > vector{} + best[k - 1];
                int any = 0;
                UNROLL for (int lane = 0; lane < lanes; lane++) any |= above[lane];
                if (!any) continue;
            }
            for (long lane = 0; lane < lanes; lane++) take(place + lane);
        }
        for (long place = even; place < size; place++) take(place);
        vector sums = {};
        for (long place = 0; place < even; place += lanes)
            sums += exponential(reinterpret_cast<const unaligned &>(from[place]) - best[0]);
        float sum = Attention::total(sums);
        for (long place = even; place < size; place++) sum += std::exp(from[place] - best[0]);
        const float whole = best[0] + std::log(sum);
        for (long rank = 0; rank < k; rank++) best[rank] -= whole;
    }
    return {values, places};
}

}  // namespace

STABLE_TORCH_LIBRARY(crossspec_cpu_lane, m) {
    m.def("pack(Tensor weight) -> Tensor");
    m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias) -> Tensor");
    m.def(
        "attend(Tensor query, Tensor kv_cache, Tensor blocks, int num_keys, Tensor hidden, float scale, float soft_cap, "
        "Tensor? sinks, Tensor(a!) output) -> ()"
    );
    m.def(
        "attend_level(Tensor query, Tensor key, Tensor value, Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
        "Tensor(a!) scratch, Tensor masks, int requests, int rows, int length, bool has_shared, float scale, "
        "int window, float soft_cap, Tensor? sinks, Tensor(b!) output) -> ()"
    );
    m.def("top(Tensor logits, int k) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(crossspec_cpu_lane, CPU, m) {
    m.impl("pack", TORCH_BOX(&pack));
    m.impl("linear", TORCH_BOX(&linear));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("attend_level", TORCH_BOX(&attend_level));
    m.impl("top", TORCH_BOX(&top));
}
