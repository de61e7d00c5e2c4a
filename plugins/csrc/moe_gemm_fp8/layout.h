// Weight layout sm90_v1: where each weight of one expert's [n, k] matrix lies. The Python packer
// (plugins/ops/weight_layout.py) writes it; both kernels read it. Changing anything here is a new
// layout with a new name.
//
// An expert is ceil(n / 64) strips of 64 rows, each one contiguous run of records, padded to 128
// bytes. A record is 128 columns: a 16-byte header (the block's fp32 scale, 12 zero bytes) and two
// halves of 64 columns; the last record has one half when k % 128 is 1 to 64. Rows and columns
// behind n and k hold zeros.
//
// Order inside a half. Thread 32w + 4g + t of a warpgroup (w < 4, g < 8, t < 4) owns rows
// 16w + 2g ("low", fragment row g) and 16w + 2g + 1 ("high", fragment row g + 8), so gate i and up
// i meet in one thread, and of each the 16 columns that begin at 32 (t / 2) + 16 (t % 2): one
// group of 32 columns, one table of codes. Column 8i + 4h + b of those 16 is byte b of A-fragment
// register (row high ? 1 : 0) + 2h of instruction i of the half.
//   MXFP4: 64 bytes of shifts, byte 16w + 2g + t / 2 = (d + 8) of the low row | (d + 8) << 4 of the
//     high row, d = group exponent - block exponent, -8 to 6. Then 16 bytes a thread: words
//     [instruction][row]. Weight (h, b) of a word has its magnitude code in bits 16h + 4b .. + 2
//     and its sign in bit 8b + 7 (h = 0) or 8b + 3 (h = 1): where a byte permute and one OR want
//     them.
//   FP8: [instruction][thread] runs of 16 bytes, the four fragment registers.
#ifndef GPTOSS_TRT_MOE_GEMM_FP8_LAYOUT_H_
#define GPTOSS_TRT_MOE_GEMM_FP8_LAYOUT_H_

#include <cstdint>

#if defined(__CUDACC__)
#define GPTOSS_HOST_DEVICE __host__ __device__
#else
#define GPTOSS_HOST_DEVICE
#endif

namespace gptoss::moe {

constexpr int kStripRows = 64;
constexpr int kRecordColumns = 128;
constexpr int kHalfColumns = 64;
constexpr int kHeaderBytes = 16;
constexpr int kShiftBytes = 64;
constexpr int kRunAlignment = 128;
constexpr int kBottomShift = -8;  // 0.5 x 2^-8 is the smallest subnormal of e4m3
constexpr int kTableRows = 16;    // a row per shift -8 to 6, and one of zeros

enum class Storage : int { kMxfp4 = 1, kFp8 = 2, kFp8Tiles = 3 };

GPTOSS_HOST_DEVICE constexpr int half_bytes(Storage storage) {
  return storage == Storage::kMxfp4 ? kShiftBytes + kStripRows * kHalfColumns / 2
                                    : kStripRows * kHalfColumns;
}

GPTOSS_HOST_DEVICE constexpr int record_bytes(Storage storage, int halves) {
  return kHeaderBytes + halves * half_bytes(storage);
}

GPTOSS_HOST_DEVICE constexpr int ceil_div(int value, int divisor) {
  return (value + divisor - 1) / divisor;
}

GPTOSS_HOST_DEVICE constexpr int records(int k) { return ceil_div(k, kRecordColumns); }

// Halves of the last record.
GPTOSS_HOST_DEVICE constexpr int tail_halves(int k) {
  return ceil_div(k - (records(k) - 1) * kRecordColumns, kHalfColumns);
}

GPTOSS_HOST_DEVICE constexpr int strips(int n) { return ceil_div(n, kStripRows); }

GPTOSS_HOST_DEVICE constexpr int64_t strip_bytes(Storage storage, int k) {
  const int64_t bytes = static_cast<int64_t>(records(k) - 1) * record_bytes(storage, 2) +
                        record_bytes(storage, tail_halves(k));
  return (bytes + kRunAlignment - 1) / kRunAlignment * kRunAlignment;
}

// Layout sm90_tiles_v1: an expert is tiles of 128 rows x 128 columns, [ceil(n / 128)][ceil(k /
// 128)], zeros behind n and k. A tile is its e4m3 codes as shared memory holds them, row r's
// 16-byte chunk c at 128 r + 16 (c ^ r % 8), then its fp32 scale and zeros to kTileBytes.
constexpr int kTileRows = 128;
constexpr int kTileBytes = kTileRows * kRecordColumns + kRunAlignment;

GPTOSS_HOST_DEVICE constexpr int weight_tiles(int n) { return ceil_div(n, kTileRows); }

GPTOSS_HOST_DEVICE constexpr int64_t expert_bytes(Storage storage, int n, int k) {
  return storage == Storage::kFp8Tiles
             ? static_cast<int64_t>(weight_tiles(n)) * records(k) * kTileBytes
             : strips(n) * strip_bytes(storage, k);
}

// e4m3 code of units x 2^-9; exact for the values that the table holds.
constexpr uint32_t e4m3_code(uint32_t units) {
  if (units < 8) return units;  // subnormal
  uint32_t exponent = 0;
  while ((units >> exponent) >= 16) ++exponent;
  return ((exponent + 1) << 3) | ((units >> exponent) & 7);
}

// Eight codes for e2m1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 times 2^shift, as two words.
struct CodeTable {
  uint32_t words[kTableRows][2];
};

constexpr CodeTable make_code_table() {
  constexpr uint32_t kDoubledMagnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  CodeTable table{};
  for (int row = 0; row + 1 < kTableRows; ++row) {
    for (int i = 0; i < 8; ++i) {
      table.words[row][i / 4] |= e4m3_code(kDoubledMagnitudes[i] << row) << (8 * (i % 4));
    }
  }
  return table;
}

}  // namespace gptoss::moe

#endif  // GPTOSS_TRT_MOE_GEMM_FP8_LAYOUT_H_
