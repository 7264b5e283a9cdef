# SPDX-License-Identifier: Apache-2.0
"""Our own block-FP8 GEMM, for one block of rows, as CUDA source.

    out[M, N] = q[M, K] x weight[N, K]^T

q and weight are e4m3 with float32 scales, q's 1x128 and weight's 128x128; out is
bfloat16; M is at most BLOCK_M. Compiled by `kernel_cache`.

A decode step reads each weight once and computes next to nothing, so the time is
memory's, if nothing else is in its way. In DeepGEMM's kernel a step of 128 along K
is: wait for the copy, multiply, wait, add the scaled product, free the stage; with
a tile of 64x40 that chain takes 120 to 170 ns, and memory has the bytes in 156. Here

- products alternate between two sets of registers: while the tensor cores make one,
  the other is scaled and added. The order of all additions is DeepGEMM's, and so is
  every bit of the result;
- a stage holds DEPTH steps that arrive by one copy each of A, its scales and B: half
  the barriers, half the copies to issue;
- weights are read with evict-first: they will not be met again before the next
  token, while A and the output stay in L2.

Parameters are those of DeepGEMM's fp8_gemm_kernel, so one launcher serves both.
A and B are described with K split in blocks: 128 values, rows, K / 128. A module and
not a header, since builds from a source tree leave out what is no Python file.
"""

SOURCE = r"""
#include <cuda.h>
#include <cuda_bf16.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/mma_utils.cuh>

namespace deep_gemm_linear {

// SMEM_BYTES is what the launcher reserves, SWIZZLE that of the output tile (0: none).
template <uint32_t N, uint32_t K, uint32_t BLOCK_M, uint32_t BLOCK_N, uint32_t STAGES,
          uint32_t DEPTH, uint32_t SWIZZLE, uint32_t SMEM_BYTES>
__global__ void __launch_bounds__(BLOCK_M == 64 ? 192 : 384, 1)
overlapped_gemm(void*, const float* scales_b, void*, uint32_t rows,
                const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b,
                const __grid_constant__ CUtensorMap map_scales_a,
                const __grid_constant__ CUtensorMap map_out) {
    using namespace deep_gemm;
    using Barrier = cutlass::arch::ClusterTransactionBarrier;
    using WGMMA = typename FP8MMASelector<BLOCK_N>::type;
    using cute::TMA::CacheHintSm90;
    static_assert(BLOCK_M == 64 || BLOCK_M == 128, "one warp group for 64 rows");
    static_assert(BLOCK_N <= 128, "a tile meets at most two rows of scales");

    constexpr uint32_t STEPS = K / 128, ROUNDS = (STEPS + DEPTH - 1) / DEPTH;
    constexpr uint32_t UNROLLED = 8;  // steps between two moments without a product under way
    constexpr uint32_t TILES = (N + BLOCK_N - 1) / BLOCK_N;
    constexpr uint32_t MATH_THREADS = BLOCK_M * 2, SUMS = WGMMA::kNumAccum;
    // Whether all columns of a tile share their scales.
    constexpr bool UNIFORM = 128 % BLOCK_N == 0;

    constexpr uint32_t OUT_BYTES = (BLOCK_M * BLOCK_N * 2 + 1023) / 1024 * 1024;
    constexpr uint32_t A_BYTES = DEPTH * BLOCK_M * 128, B_BYTES = DEPTH * BLOCK_N * 128;
    constexpr uint32_t SCALES_A = DEPTH * BLOCK_M;
    constexpr uint32_t SCALES_B = UNIFORM ? STEPS + STEPS % 2 : STEPS * 2;
    static_assert(OUT_BYTES + STAGES * (A_BYTES + B_BYTES + SCALES_A * 4) + SCALES_B * 4
                  + STAGES * 16 == SMEM_BYTES, "launcher and kernel disagree");
    extern __shared__ __align__(1024) uint8_t smem_out[];
    uint8_t* smem_a = smem_out + OUT_BYTES;
    uint8_t* smem_b = smem_a + STAGES * A_BYTES;
    float* smem_scales_a = reinterpret_cast<float*>(smem_b + STAGES * B_BYTES);
    float* smem_scales_b = smem_scales_a + STAGES * SCALES_A;
    auto full = reinterpret_cast<Barrier*>(smem_scales_b + SCALES_B);
    auto empty = full + STAGES;

    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == MATH_THREADS) {
        for (auto map : {&map_b, &map_a, &map_scales_a, &map_out})
            cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(map));
        for (uint32_t s = 0; s < STAGES; ++s) {
            full[s].init(2);
            empty[s].init(MATH_THREADS / 32);
        }
        cutlass::arch::fence_view_async_shared();
    }
    __syncthreads();

    uint32_t stage = 0, phase = 0;
    auto advance = [&] {
        if (++stage == STAGES)
            stage = 0, phase ^= 1;
    };

    if (warp >= MATH_THREADS / 32) {
        // One thread copies B, one of another warp A and its scales.
        if constexpr (BLOCK_M > 64)
            cutlass::arch::warpgroup_reg_dealloc<40>();
        auto copy_all = [&](uint32_t bytes, auto copy) {
            // The quantizer lets this kernel in before it is done.
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (uint32_t tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
                #pragma unroll 1
                for (uint32_t round = 0; round < ROUNDS; ++round, advance()) {
                    empty[stage].wait(phase ^ 1);
                    full[stage].arrive_and_expect_tx(bytes);
                    copy(reinterpret_cast<uint64_t*>(full + stage), tile, round);
                }
            }
        };
        if (threadIdx.x == MATH_THREADS)
            copy_all(B_BYTES, [&](uint64_t* barrier, uint32_t tile, uint32_t round) {
                cute::SM90_TMA_LOAD_3D::copy(
                    &map_b, barrier, static_cast<uint64_t>(CacheHintSm90::EVICT_FIRST),
                    smem_b + stage * B_BYTES, 0, tile * BLOCK_N, round * DEPTH);
            });
        else if (threadIdx.x == MATH_THREADS + 32)
            // Only rows that exist arrive. The shared memory of the others holds
            // anything; rows of a product do not mix.
            copy_all(rows * DEPTH * (128 + 4), [&](uint64_t* barrier, uint32_t, uint32_t round) {
                constexpr auto hint = static_cast<uint64_t>(CacheHintSm90::EVICT_NORMAL);
                cute::SM90_TMA_LOAD_3D::copy(&map_a, barrier, hint, smem_a + stage * A_BYTES,
                                             0, 0, round * DEPTH);
                cute::SM90_TMA_LOAD_2D::copy(&map_scales_a, barrier, hint,
                                             smem_scales_a + stage * SCALES_A,
                                             0, round * DEPTH);
            });
        return;
    }

    if constexpr (BLOCK_M > 64)
        cutlass::arch::warpgroup_reg_alloc<232>();
    const uint32_t row = warp * 16 + lane / 4;
    const uint64_t desc_a = make_smem_desc(smem_a + warp / 4 * 64 * 128, 1);
    const uint64_t desc_b = make_smem_desc(smem_b, 1);
    auto sync = [] { cutlass::arch::NamedBarrier(MATH_THREADS).sync(); };

    for (uint32_t tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
        const uint32_t column = tile * BLOCK_N, scale_row = column / 128;
        // Columns before the next row of scales begins, in groups of 8.
        const uint32_t former = UNIFORM ? BLOCK_N / 8 : (128 - column % 128) / 8;
        const bool straddles = former * 8 < BLOCK_N && scale_row + 1 < (N + 127) / 128;
        for (uint32_t i = threadIdx.x; i < STEPS; i += MATH_THREADS) {
            const float* from = scales_b + scale_row * STEPS + i;
            smem_scales_b[i] = __ldg(from);
            if constexpr (not UNIFORM)
                smem_scales_b[STEPS + i] = straddles ? __ldg(from + STEPS) : 0;
        }
        sync();

        struct Scales { float a_0, a_1, b_0, b_1; } scales[2];
        float products[2][SUMS], sums[SUMS] = {0};
        auto add = [&](float (&product)[SUMS], const Scales& by) {
            #pragma unroll
            for (uint32_t i = 0; i < SUMS; ++i)
                warpgroup_fence_operand(product[i]);
            const float s_00 = by.a_0 * by.b_0, s_10 = by.a_1 * by.b_0;
            const float s_01 = by.a_0 * by.b_1, s_11 = by.a_1 * by.b_1;
            // A thread has two columns of `row` and two of `row + 8` in each group of 8.
            #pragma unroll
            for (uint32_t i = 0; i < SUMS; ++i) {
                const bool first = UNIFORM or i / 4 < former;
                const float scale = i % 4 < 2 ? (first ? s_00 : s_01) : (first ? s_10 : s_11);
                sums[i] += scale * product[i];
            }
        };
        // ptxas keeps a product under way only within straight code, hence the unrolling.
        auto multiply = [&](uint32_t start, auto count) {
            Barrier* done = nullptr;
            #pragma unroll
            for (uint32_t u = 0; u < count.value; ++u) {
                const uint32_t d = u % DEPTH;
                auto& product = products[u % 2];
                if (d == 0)
                    full[stage].wait(phase);
                const float* a = smem_scales_a + stage * SCALES_A + d * rows + row;
                const float* b = smem_scales_b + start + u;
                scales[u % 2] = {ld_shared(a), ld_shared(a + 8), ld_shared(b),
                                 UNIFORM ? 0.f : ld_shared(b + STEPS)};
                #pragma unroll
                for (uint32_t i = 0; i < SUMS; ++i)
                    warpgroup_fence_operand(product[i]);
                warpgroup_arrive();
                #pragma unroll
                for (uint32_t k = 0; k < 128; k += WGMMA::K)
                    WGMMA::wgmma(desc_a + (stage * A_BYTES + d * rows * 128 + k) / 16,
                                 desc_b + (stage * B_BYTES + d * BLOCK_N * 128 + k) / 16,
                                 product, k);
                warpgroup_commit_batch();
                if (u) {
                    warpgroup_wait<1>();
                    if (d == 0 and lane == 0)
                        done->arrive();
                    add(products[(u - 1) % 2], scales[(u - 1) % 2]);
                }
                if (d == DEPTH - 1 or u == count.value - 1) {
                    done = empty + stage;
                    advance();
                }
            }
            warpgroup_wait<0>();
            if (lane == 0)
                done->arrive();
            add(products[(count.value - 1) % 2], scales[(count.value - 1) % 2]);
        };
        #pragma unroll 1
        for (uint32_t step = 0; step + UNROLLED <= STEPS; step += UNROLLED)
            multiply(step, cute::Int<UNROLLED>{});
        if constexpr (STEPS % UNROLLED)
            multiply(STEPS / UNROLLED * UNROLLED, cute::Int<STEPS % UNROLLED>{});

        // The store of the last tile must have read its shared memory.
        if (threadIdx.x == 0)
            cute::tma_store_wait<0>();
        sync();
        constexpr uint32_t STRIP = SWIZZLE ? SWIZZLE : BLOCK_N * 2;  // bytes of a row a store takes
        #pragma unroll
        for (uint32_t i = 0; i < SUMS / 2; ++i) {
            const uint32_t at = i / 2 * 16 + lane % 4 * 4;
            uint32_t offset = (row + i % 2 * 8) * STRIP + at % STRIP;
            if constexpr (SWIZZLE)
                offset ^= offset >> 3 & (SWIZZLE - 16);
            *reinterpret_cast<__nv_bfloat162*>(smem_out + at / STRIP * BLOCK_M * STRIP + offset) =
                __float22bfloat162_rn({sums[i * 2], sums[i * 2 + 1]});
        }
        cute::tma_store_fence();
        sync();
        if (threadIdx.x == 0) {
            for (uint32_t at = 0; at < BLOCK_N * 2; at += STRIP)
                cute::SM90_TMA_STORE_2D::copy(&map_out, smem_out + at * BLOCK_M,
                                              column + at / 2, 0);
            cute::tma_store_arrive();
        }
    }
    if (threadIdx.x == 0)
        cute::tma_store_wait<0>();
}

}  // namespace deep_gemm_linear
"""
