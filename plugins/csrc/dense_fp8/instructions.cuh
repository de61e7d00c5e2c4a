// Tensor copies and WGMMA on e4m3 with both operands in shared memory, as a tensor copy with
// 128-byte swizzle leaves them: rows of 128 columns of K, eight rows to a kilobyte.
#ifndef GPTOSS_TRT_DENSE_FP8_INSTRUCTIONS_CUH_
#define GPTOSS_TRT_DENSE_FP8_INSTRUCTIONS_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/ptx.cuh"

namespace gptoss::dense_fp8 {

// ---- tensor copies --------------------------------------------------------------------------

// A box of the map to shared memory; completes on `barrier`. What lies outside the tensor arrives
// as zeros and counts as bytes.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, int column,
                                         int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// copy_box of what is read once (see bulk_copy_once).
__device__ __forceinline__ void copy_box_once(uint32_t target, const CUtensorMap& map, int column,
                                              int row, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "mov.b64 policy, 0x12F0000000000000;\n"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], policy;\n"
      "}\n" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// copy_box to the blocks of the cluster in `blocks` (a bit each), at the same places of each.
__device__ __forceinline__ void copy_box_to_all(uint32_t target, const CUtensorMap& map, int column,
                                                int row, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// A box of shared memory to the map's tensor, but for what lies outside; part of the calling
// thread's next bulk_stores_commit.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int column, int row,
                                          uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(source)
      : "memory");
}

// Arrives at `barrier` once the calling thread's copy_word_async have landed.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- tokens in registers ----------------------------------------------------------------------

constexpr int kFragmentColumns = 128;  // of K

// Where ldmatrix reads a warpgroup's 64 rows of so many columns, behind the first: lane 8i + r
// gives the address of row r of rows 0 to 7, 8 to 15, and the same of the next 16 columns.
__device__ __forceinline__ uint32_t fragment_place() {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  return row * kFragmentColumns + 16 * (lane / 16 ^ lane % 8);
}

// The M operand of wgmma_e4m3.
using TokenFragments = uint32_t[kFragmentColumns / 32][4];

// `place`: of the rows, and fragment_place() behind it.
__device__ __forceinline__ void load_fragments(uint32_t place, TokenFragments& a) {
#pragma unroll
  for (int i = 0; i < kFragmentColumns / 32; ++i) load_matrices(place ^ (32 * i), a[i]);
  wgmma_operands_ready(a);
}

// ---- WGMMA ----------------------------------------------------------------------------------

// Descriptor of such rows from `address` on, a multiple of 1,024; adding n moves it by 16 n bytes.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t address) {
  constexpr uint64_t kGroupBytes = 1024, kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(1) << 16 |
         (kGroupBytes >> 4) << 32 | kSwizzle128 << 62;
}

// d[64, kColumns] = a[64, 32] b[kColumns, 32]^T (+ d when `accumulate` is not 0). With lane = 4g +
// t of the warp that has 16 of the rows: d[4j + c] is row g (c < 2) or g + 8, column 8j + 2t + (c &
// 1).
template <int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], uint64_t a, uint64_t b,
                                         int accumulate);

template <>
__device__ __forceinline__ void multiply<64>(float (&d)[32], uint64_t a, uint64_t b,
                                             int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, accumulate, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void multiply<128>(float (&d)[64], uint64_t a, uint64_t b,
                                              int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, accumulate, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate));
}

}  // namespace gptoss::dense_fp8

#endif  // GPTOSS_TRT_DENSE_FP8_INSTRUCTIONS_CUH_
