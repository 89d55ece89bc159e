"""Which tests launch which GPU kernels, for compute-sanitizer: of each file all, few and small.

Names are pytest's, below tests/runtime/compute/gpu. `python -m bench.sanitize_gpu --rehearse` says
whether they launch every kernel.
"""

from __future__ import annotations

CASES: dict[str, tuple[str, ...]] = {
    "add_sums.cu": (
        "launch/test_row_kernels.py::test_sums_are_rounded_once_and_added_to_the_residual"
        "[(32, False)-False]",
        "launch/test_row_kernels.py::test_rows_are_added_in_place_or_elsewhere[(32, False)]",
    ),
    "append_choices.cu": (
        "ops/test_choice_notes.py::test_rows_are_the_choices_of_steps_by_position[(32, False)]",
        "ops/test_choice_notes.py::test_a_trees_choices_are_rows_of_their_own[(32, False)]",
    ),
    "attention_decode.cu": (
        "layers/test_attention_decode.py::test_one_token_attends_to_all_up_to_its_own[130-case0-3e-06]",
        "layers/test_attention_decode.py::test_one_token_attends_to_all_up_to_its_own[130-case4-0.002]",
    ),
    "attention_merge.cu": (
        "layers/test_attention_decode.py::test_results_as_int8_rows[case0]",
        "layers/test_attention_decode.py::test_sinks_and_queries_that_grow_without_rotation"
        "[94-case0-3e-06]",
    ),
    "attention_nodes.cu": (
        "layers/test_attention_tree.py::test_a_token_has_the_bits_of_a_step[case1]",
        "layers/test_attention_tree.py::test_a_token_has_the_bits_of_a_step[case2]",
    ),
    "attention_prefill.cu": (
        "layers/test_attention_prefill.py::test_a_chunk_attends_to_all_before_and_inside_it"
        "[37-40-case0-3e-06]",
        "layers/test_attention_prefill.py::test_a_chunk_attends_to_all_before_and_inside_it"
        "[37-40-case3-0.005]",
    ),
    "attention_store.cu": (
        "layers/test_attention_prefill.py::test_a_chunk_attends_to_all_before_and_inside_it"
        "[37-40-case0-3e-06]",
        "layers/test_attention_prefill.py::test_sinks_and_queries_that_grow_without_rotation[case1-0.005]",
    ),
    "attention_tree.cu": (
        "layers/test_attention_tree.py::test_a_token_has_the_bits_of_a_step[case0]",
        "layers/test_attention_tree.py::test_a_token_has_the_bits_of_a_step[case1]",
    ),
    "combine.cu": (
        "launch/test_prefill_experts.py::test_sums_of_others_and_the_residual_are_added",
    ),
    "delta_chunk.cu": ("layers/test_delta.py::test_a_step_too_much_spoils_nothing[(32, False)]",),
    "delta_step.cu": ("layers/test_delta.py::test_a_step_too_much_spoils_nothing[(32, False)]",),
    "delta_tree.cu": (
        "layers/test_delta.py::test_tokens_of_a_tree_go_on_from_their_parents[tiled]",
    ),
    "dequantise.cu": ("launch/test_prefill_dense.py::test_every_type_is_dequantised[Q4_0]",),
    "sample.cu": (
        "launch/test_sample_tokens.py::test_where_rounding_decides_the_host_does[options4-0.3]",
    ),
    "elementwise.cu": ("launch/test_row_kernels.py",),
    "embed.cu": ("launch/test_layouts.py::test_rows_of_an_embedding[32-14-512]",),
    "exchange.cu": (
        "transfers/test_exchange.py::test_a_step_has_the_same_bits_however_many_tokens_it_has",
    ),
    "experts_decode.cu": (
        "launch/test_decode_experts.py::test_what_is_not_resident_is_left_out[(32, True)]",
        "mailbox/test_request.py::test_what_is_asked_for_has_the_bits_of_rows_and_a_choice"
        "[(32, True)-here-bytes and floats]",
        "mailbox/test_mailbox.py::test_experts_that_ask_peers_do_what_two_kernels_do"
        "[Q8_0-(32, True)-3-False]",
        "launch/test_fetched_experts.py"
        "::test_pairs_of_what_was_fetched_have_the_bits_of_what_is_here[(32, True)-5-True]",
    ),
    "fetch_expert.cu": (
        "launch/test_fetch_expert.py::test_a_slot_gets_the_experts_bytes[(32, True)-2-in fields]",
        "launch/test_fetch_expert.py::test_the_second_expert_that_is_asked_for_is_fetched"
        "[(32, True)-True-1]",
        "launch/test_fetch_expert.py::test_the_second_expert_that_is_asked_for_is_fetched"
        "[(32, True)-True-8]",
    ),
    "gemm_dense.cu": (
        "launch/test_prefill_dense.py::test_several_matrices_at_once[40-tensor]",
        "launch/test_prefill_dense.py::test_several_matrices_at_once[40-fma]",
    ),
    "gemm_down.cu": (
        "launch/test_prefill_experts.py::test_bits_do_not_depend_on_the_batch[tensor]",
    ),
    "gemm_gate_up.cu": (
        "launch/test_prefill_experts.py::test_bits_do_not_depend_on_the_batch[tensor]",
    ),
    "group_experts.cu": (
        "launch/test_prefill_experts.py::test_a_sorted_batch_gives_what_its_choice_gives",
    ),
    "half_rows.cu": (
        "launch/test_prefill_dense.py::test_rows_are_normalised_and_kept_from_overflow[1-32]",
    ),
    "level_activations.cu": (
        "launch/test_prefill_experts.py::test_bits_do_not_depend_on_the_batch[tensor]",
    ),
    "linear_decode.cu": (
        "launch/test_decode_linear.py::test_norm_and_several_matrices[(32, False)-3]",
        "launch/test_decode_linear.py::test_int8_rows_and_a_residual[(32, False)-6-96-8]",
    ),
    "mailbox_begin.cu": (
        "mailbox/test_mailbox.py::test_replies_are_added_in_order_and_rounded_once",
    ),
    "mailbox_daemon.cu": (
        "mailbox/test_mailbox.py::test_what_is_posted_is_taken",
        "mailbox/test_request.py::test_what_is_asked_for_has_the_bits_of_rows_and_a_choice"
        "[(32, True)-relayed-bytes and floats]",
    ),
    "mailbox_parent.cu": (
        "mailbox/test_mailbox.py::test_what_is_posted_is_taken",
        "mailbox/test_mailbox.py::test_replies_are_added_in_order_and_rounded_once",
        "mailbox/test_mailbox.py::test_a_rounded_reply_is_taken_for_nothing_else",
    ),
    "mailbox_probe.cu": (
        "mailbox/test_mailbox.py::test_a_probe_finds_what_did_not_arrive_as_sent",
    ),
    "move_payload.cu": (
        "transfers/test_payload.py::test_rows_go_out_and_come_in[32-7]",
        "transfers/test_payload.py::test_sums_are_added_to_the_rows_that_are_named[32]",
    ),
    "quantise_rows.cu": (
        "launch/test_decode_linear.py::test_quantising_rows_once[(32, False)-0]",
        "launch/test_decode_linear.py::test_quantising_rows_once[(32, False)-4]",
    ),
    "repack.cu": ("launch/test_layouts.py::test_the_device_repacks_as_numpy_does[32-11-768]",),
    "route_rows.cu": (
        "launch/test_route_scores.py"
        "::test_experts_are_chosen_as_by_the_reference[(32, False)-12-4-True]",
    ),
    "route_scores.cu": (
        "launch/test_route_scores.py"
        "::test_the_reference_chooses_the_same[(32, False)-sigmoid-True]",
    ),
    "router.cu": (
        "launch/test_decode_linear.py::test_logits_and_the_rows_beside_them[(32, False)-0-12-3-96]",
    ),
    "argmax_logits.cu": (
        "launch/test_decode_linear.py::test_a_row_that_is_not_finite_has_no_token",
    ),
}
"""Tests by kernel file."""
