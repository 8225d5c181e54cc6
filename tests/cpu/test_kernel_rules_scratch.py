"""Scratch memory of CUDA kernels, against sizes seen in recordings of real cards and against cases worked out by hand from the sources."""

import pytest
import torch

from tightfit.capture.kernels import Card, scratch_bytes, scratch_events
from tightfit.capture.kernels.attention.attention_scratch import cudnn_backward_workspace_bytes
from tightfit.capture.kernels.indexing.sorting import radix_sort_bytes
from tightfit.capture.kernels.reductions import reduction_buffers
from tightfit.capture.kernels.rule import bind
from tightfit.capture.kernels.scratch import SCRATCH

aten = torch.ops.aten
H100 = Card(compute_capability=(9, 0), num_multiprocessors=132)
A100 = Card(compute_capability=(8, 0), num_multiprocessors=108)
RTX3060 = Card(compute_capability=(8, 6), num_multiprocessors=28)
T4 = Card(compute_capability=(7, 5), num_multiprocessors=40)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class TestReductions:
    """Buffers of partial sums as recordings of an H100 show them (a 2.7B model, batch 4, context 256, width 2560, vocabulary 10,000)."""

    def test_a_sum_over_a_transposed_width(self):
        hidden = meta(2560, 1024).t().view(4, 256, 2560)
        assert reduction_buffers(hidden, (-1,), 4, H100) == (20_971_520, 32)

    def test_a_gradient_is_summed_over_batch_and_sequence(self):
        assert reduction_buffers(meta(4, 256, 2560), (0, 1), 4, H100) == (4 * 2560 * 16 * 128, 4 * 20)

    def test_a_sum_over_a_transposed_vocabulary(self):
        logits = meta(10_000, 1024).t().view(4, 256, 10_000)
        assert reduction_buffers(logits, (-1,), 4, H100) == (82_313_216, 32)

    def test_a_maximum_with_its_position_carries_sixteen_bytes(self):
        logits = meta(10_000, 1024).t().view(4, 256, 10_000)
        assert scratch_bytes(aten.max.dim, (logits, -1, True), {}, (meta(4, 256, 1), meta(4, 256, 1)), H100) == (
            329_252_864,
            32,
        )

    def test_a_short_row_needs_no_second_pass(self):
        assert reduction_buffers(meta(4096, 1024), (-1,), 4, H100) == (0, 0)

    def test_a_row_per_block_when_rows_are_many(self):
        assert reduction_buffers(meta(100_000, 10_000), (-1,), 4, A100) == (0, 0)

    def test_a_mean_over_everything_splits_one_output_over_the_card(self):
        partial, semaphores = reduction_buffers(meta(1 << 24), (), 4, A100)
        assert partial == 4 * 432 and semaphores == 4  # 108 multiprocessors, 4 blocks of 512 threads on each

    def test_counting_true_entries_first_makes_integers(self):
        mask = meta(1000, 1000, dtype=torch.bool)
        assert scratch_bytes(aten.sum.default, (mask,), {}, meta(dtype=torch.int64), H100)[0] == 8_000_000

    def test_a_number_without_dimensions_is_reduced_along_its_only_one(self):
        assert scratch_bytes(aten.max.dim, (meta(), 0), {}, (meta(), meta(dtype=torch.int64)), H100) == ()
        assert scratch_bytes(aten.linalg_vector_norm.default, (meta(), 2, [-1]), {}, meta(), H100) == ()

    def test_a_half_sum_into_float_converts_nothing(self):
        half = meta(64, 64, dtype=torch.float16)
        assert scratch_bytes(aten.sum.default, (half,), {"dtype": torch.float32}, meta(), H100) == ()

    def test_a_norm_of_many_gradients_holds_one_number_per_chunk_of_the_largest(self):
        gradients = [meta(768), meta(50257, 768)]
        assert scratch_bytes(aten._foreach_norm.Scalar, (gradients,), {}, [meta(), meta()], H100) == (2 * 589 * 4,)


class TestEmbedding:
    def test_few_tokens_take_the_small_kernel(self):
        arguments = (meta(3072, 64), meta(3072, dtype=torch.int64), 1000, -1, False)
        assert scratch_bytes(aten.embedding_dense_backward.default, arguments, {}, meta(1000, 64), H100) == ()

    def test_many_tokens_are_sorted_and_summed_in_float32(self):
        grad = meta(8192, 4096, dtype=torch.bfloat16)
        arguments = (grad, meta(8192, dtype=torch.int64), 32000, -1, False)
        blocks = scratch_bytes(aten.embedding_dense_backward.default, arguments, {}, meta(32000, 4096), H100)
        assert max(blocks) == (8192 // 10 + 8192) * 4096 * 4
        assert blocks[:2] == (8192 * 8, 8192 * 8)

    def test_a_small_vocabulary_bounds_the_partial_sums(self):
        arguments = (meta(100_000, 128), meta(100_000, dtype=torch.int64), 500, -1, False)
        blocks = scratch_bytes(aten.embedding_dense_backward.default, arguments, {}, meta(500, 128), H100)
        assert max(blocks) == (10_000 + 500) * 128 * 4

    def test_the_sort_is_over_before_the_sums_begin(self):
        arguments = (meta(8192, 64), meta(8192, dtype=torch.int64), 32000, -1, False)
        events = scratch_events(aten.embedding_dense_backward.default, arguments, {}, meta(32000, 64), H100)
        assert events[2:6] == (8192 * 8, radix_sort_bytes(8192, 8, 8), -4, -3)


class TestIndexing:
    def test_an_accumulating_put_sorts_its_indices(self):
        arguments = (meta(1000, 64), [meta(1024, dtype=torch.int64)], meta(1024, 64), True)
        assert scratch_bytes(aten.index_put_.default, arguments, {}, meta(1000, 64), H100) == (
            8192,
            8192,
            8192,
            8192,
            1,
        )

    def test_a_plain_put_writes_in_place(self):
        arguments = (meta(1000, 64), [meta(1024, dtype=torch.int64)], meta(1024, 64), False)
        assert scratch_bytes(aten.index_put_.default, arguments, {}, meta(1000, 64), H100) == ()
        nowhere = (meta(1000, 64), (meta(0, dtype=torch.int64),), meta(0, 64), True)
        assert scratch_events(aten.index_put.default, nowhere, {}, meta(1000, 64), H100) == ()

    def test_a_mask_becomes_coordinates(self):
        arguments = (meta(32, 100, 8), [meta(32, 100, dtype=torch.bool)])
        assert scratch_bytes(aten.index.Tensor, arguments, {}, meta(700, 8), H100) == (700 * 2 * 8,)


class TestSorting:
    def test_rows_up_to_4096_sort_in_place(self):
        outputs = (meta(8, 4096), meta(8, 4096, dtype=torch.int64))
        assert scratch_bytes(aten.sort.default, (meta(8, 4096),), {}, outputs, H100) == ()

    def test_a_single_long_row_holds_positions_and_the_alternate_buffer(self):
        count = 1_000_000
        outputs = (meta(count), meta(count, dtype=torch.int64))
        positions, storage = scratch_bytes(aten.sort.default, (meta(count),), {}, outputs, H100)
        assert positions == 8 * count
        assert 12 * count < storage < 12.5 * count

    def test_many_long_rows_sort_by_segment(self):
        outputs = (meta(128, 5000), meta(128, 5000, dtype=torch.int64))
        assert scratch_bytes(aten.sort.stable, (meta(128, 5000),), {"stable": True}, outputs, H100) == (
            640_000 * 8,
            640_000 * 12,
        )

    def test_topk_of_a_vocabulary_counts_digits_by_block(self):
        outputs = (meta(8, 50), meta(8, 50, dtype=torch.int64))
        blocks = scratch_bytes(aten.topk.default, (meta(8, 50_000), 50), {}, outputs, A100)
        assert blocks[3] == 8 * 49 * 256 * 2  # 4 items a thread, 256 threads: 49 blocks a row

    def test_topk_of_few_values_runs_in_one_block(self):
        assert scratch_bytes(aten.topk.default, (meta(8, 100), 5), {}, (meta(8, 5), meta(8, 5)), A100) == ()


class TestNormalization:
    def test_layer_norm_of_a_language_model_needs_nothing(self):
        arguments = (
            meta(8192, 4096),
            meta(8192, 4096),
            [4096],
            meta(8192, 1),
            meta(8192, 1),
            meta(4096),
            meta(4096),
            [True] * 3,
        )
        outputs = (meta(8192, 4096), meta(4096), meta(4096))
        assert scratch_bytes(aten.native_layer_norm_backward.default, arguments, {}, outputs, A100) == ()

    def test_layer_norm_of_many_short_rows_sums_in_two_passes(self):
        rows = 128 * 56 * 56
        tensor = meta(rows, 96)
        arguments = (tensor, tensor, [96], meta(rows, 1), meta(rows, 1), meta(96), meta(96), [True] * 3)
        outputs = (tensor, meta(96), meta(96))
        assert (
            scratch_bytes(aten.native_layer_norm_backward.default, arguments, {}, outputs, A100)
            == (10922 * 96 * 4,) * 2
        )

    def test_channels_last_batch_norm_stages_its_statistics(self):
        tensor = meta(64, 256, 56, 56).to(memory_format=torch.channels_last)
        arguments = (tensor, meta(256), meta(256), meta(256), meta(256), True, 0.1, 1e-5)
        assert scratch_bytes(aten.native_batch_norm.default, arguments, {}, (tensor, meta(256), meta(256)), A100) == (
            4 * 256 * 128 * 4,
        )


class TestAttention:
    def test_flash_backward_accumulates_queries_in_float32(self):
        query = meta(8, 16, 1000, 64, dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
        blocks = self.flash_backward(query, query)
        assert blocks == (8 * 16 * 1024 * 4, 8 * 16 * 1024 * 64 * 4)

    def test_flash_backward_writes_grouped_gradients_per_query_head(self):
        query = meta(2, 1024, 32, 128, dtype=torch.bfloat16).transpose(1, 2)
        key = meta(2, 1024, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
        assert self.flash_backward(query, key)[2:] == (2 * 32 * 1024 * 128 * 2,) * 2

    def test_a_gradient_that_lies_heads_first_is_copied(self):
        query = meta(2, 1024, 32, 128, dtype=torch.bfloat16).transpose(1, 2)
        grad = meta(2, 32, 1024, 128, dtype=torch.bfloat16)
        assert self.flash_backward(query, query, grad)[0] == 2 * 32 * 1024 * 128 * 2

    @staticmethod
    def flash_backward(query: torch.Tensor, key: torch.Tensor, grad: torch.Tensor | None = None) -> tuple[int, ...]:
        state = meta(2, dtype=torch.uint64)
        arguments = (
            query if grad is None else grad,
            query,
            key,
            key,
            query,
            meta(1),
            None,
            None,
            1,
            1,
            0.0,
            True,
            state,
            state,
        )
        outputs = (query, key, key)
        return scratch_bytes(aten._scaled_dot_product_flash_attention_backward.default, arguments, {}, outputs, A100)

    def test_decoding_one_token_splits_the_keys(self):
        query, key = meta(1, 32, 1, 128, dtype=torch.float16), meta(1, 8, 8192, 128, dtype=torch.float16)
        arguments = (query, key, key)
        lse, out = scratch_bytes(aten._scaled_dot_product_flash_attention.default, arguments, {}, (query,), A100)
        assert out == lse * 128
        assert lse % (32 * 4) == 0 and lse > 32 * 4

    def test_a_training_batch_is_not_split(self):
        query = meta(8, 32, 2048, 128, dtype=torch.float16)
        assert (
            scratch_bytes(aten._scaled_dot_product_flash_attention.default, (query, query, query), {}, (query,), A100)
            == ()
        )

    def test_efficient_backward_in_float32_forms_the_product_before_the_workspace(self):
        query = meta(4, 512, 12, 64).transpose(1, 2)
        events = self.efficient_backward(query)
        product, rows = 4 * 12 * 512 * 64 * 4, 4 * 12 * 512 * 4
        tiles = 8 * (16 + 4 * 64 * 64) // 4
        assert events == (product, rows, rows, -2, -1, 4 * 12 * tiles * 4)

    def test_efficient_backward_in_half_computes_delta_itself(self):
        query = meta(4, 512, 12, 64, dtype=torch.float16).transpose(1, 2)
        assert self.efficient_backward(query)[0] == 4 * 12 * 512 * 4

    @staticmethod
    def efficient_backward(query: torch.Tensor) -> tuple[int, ...]:
        state = meta(dtype=torch.int64)
        arguments = (query, query, query, query, None, query, meta(1), state, state, 0.0, [True, True, True, False])
        outputs = (query, query, query, None)
        return scratch_events(
            aten._scaled_dot_product_efficient_attention_backward.default, arguments, {}, outputs, A100
        )

    def test_cudnn_backward_is_a_range(self):
        query = meta(4, 32, 2048, 128, dtype=torch.bfloat16)
        likely, low, high = cudnn_backward_workspace_bytes(query, query, query, H100)
        assert low <= likely <= high
        assert likely >= 4 * 32 * 2048 * 128 * 4


class TestOperands:
    def test_a_matrix_that_is_dense_in_no_dimension_is_copied(self):
        strided = meta(64, 64, 2)[..., 0]
        assert scratch_bytes(aten.mm.default, (strided, meta(64, 64)), {}, meta(64, 64), A100) == (64 * 64 * 4,)

    def test_a_transposed_matrix_is_read_as_it_lies(self):
        assert scratch_bytes(aten.mm.default, (meta(64, 32).t(), meta(64, 64)), {}, meta(32, 64), A100) == ()

    def test_a_mean_squared_error_first_writes_every_element(self):
        assert scratch_bytes(aten.mse_loss.default, (meta(100), meta(100)), {}, meta(), A100) == (400,)
        assert scratch_bytes(aten.mse_loss.default, (meta(100), meta(100), 0), {}, meta(100), A100) == ()


class TestTable:
    def test_an_operator_without_a_rule_takes_nothing(self):
        assert scratch_bytes(aten.relu.default, (meta(100),), {}, meta(100), A100) == ()

    def test_peak_and_events_agree(self):
        query = meta(4, 512, 12, 64).transpose(1, 2)
        events = TestAttention.efficient_backward(query)
        state = meta(dtype=torch.int64)
        arguments = (query, query, query, query, None, query, meta(1), state, state, 0.0, [True, True, True, False])
        operator = aten._scaled_dot_product_efficient_attention_backward.default
        assert sum(scratch_bytes(operator, arguments, {}, (query, query, query, None), A100)) == sum(events[:3])

    @pytest.mark.parametrize("operator", sorted(SCRATCH, key=str), ids=str)
    def test_every_rule_reads_only_what_its_operator_has(self, operator):
        names = {argument.name for argument in operator._schema.arguments}
        bound = bind(operator, (), {})
        assert set(bound) == names


def test_a_sparse_matrix_is_not_copied_densely_for_a_product():
    sparse = torch.eye(64).to_sparse()
    dense = torch.ones(64, 8)
    assert scratch_events(aten.mm.default, (sparse.t(), dense), {}, dense, A100) == ()
    assert scratch_events(aten.mm.default, (torch.eye(64)[::2, ::2], dense[:32]), {}, dense[:32], A100) == (
        32 * 32 * 4,
    )


class TestNothing:
    """An expert that no token goes to, or an image without a box: no kernel runs."""

    def test_attention(self):
        query = meta(0, 8, 16, 64, dtype=torch.float16)
        arguments = (query, query, query)
        outputs = (query, meta(0, 8, 16))
        assert scratch_bytes(aten._scaled_dot_product_flash_attention.default, arguments, {}, outputs, A100) == ()

    def test_a_product(self):
        assert scratch_bytes(aten.mm.default, (meta(0, 64), meta(64, 64)), {}, meta(0, 64), A100) == ()
