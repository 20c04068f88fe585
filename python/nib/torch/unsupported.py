# SPDX-License-Identifier: Apache-2.0
"""Public names of TransformerEngine that nib does not serve: they import, and say so when they are used."""


def _message(name):
    return f"nib does not have TransformerEngine's {name}: it has no equal here (docs/python.md, table of names)"


def _unsupported(name):
    """A class by this name that raises when it is made; as a function it raises when it is called."""
    def __new__(cls, *args, **kwargs):
        raise NotImplementedError(_message(name))
    return type(name, (), {"__new__": __new__, "__doc__": _message(name), "__module__": __name__})


# module of transformer_engine.pytorch: names
NAMES = {module: tuple(names.split()) for module, names in {
    "": ("CPLoadBalancingStrategy CusolverMpCtx FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant "
         "GatedDeltaNet2Attention GatedDeltaNetAttention GatedDeltaProductAttention InferenceParams "
         "ManualOffloadSynchronizer UserBufferQuantizationMode destroy_ub initialize_ub "
         "make_graphed_callables moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs "
         "moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute newton_schulz newton_schulz_tp "
         "onnx_export parallel_cross_entropy"),
    "attention": ("FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNet2Attention GatedDeltaNetAttention "
                  "GatedDeltaProductAttention InferenceParams"),
    "attention.custom_ops": "convert_bshd_to_thd convert_thd_to_bshd copy_to_kv_cache fa_prepare_bwd fa_prepare_fwd",
    "attention.dot_product_attention.backends": (
        "FP8EmulationFunc FlashAttention FusedAttention FusedAttnBwdArgs FusedAttnFunc FusedAttnFwdArgs "
        "UnfusedDotProductAttention"),
    "attention.dot_product_attention.context_parallel": (
        "AttnFuncWithCPAndKVAllGather AttnFuncWithCPAndKVP2P AttnFuncWithCPAndQKVOA2A attn_forward_func_with_cp "
        "cp_p2p_bwd_flash_attn cp_p2p_bwd_fused_attn cp_p2p_bwd_prepare_qkv cp_p2p_fwd_flash_attn "
        "cp_p2p_fwd_fused_attn cp_p2p_fwd_prepare_qkv cp_per_step_configs flash_attn_a2a_communicate "
        "flash_attn_a2a_communicate_softmax_offset flash_attn_fwd_incremental_out_correction "
        "flash_attn_fwd_incremental_second_half_out_correction flash_attn_fwd_second_half_softmax_lse_correction "
        "flash_attn_fwd_softmax_lse_correction flash_attn_p2p_communicate generate_positional_ids_for_cp "
        "get_batch_on_this_cp_rank get_bsh_dims get_cu_seqlens_on_cp_rank get_fa_args "
        "get_kv_seq_info_after_all_gather get_no_load_balance_thd_causal_metadata "
        "get_seq_chunk_ids_for_reordering_after_attn get_seq_chunk_ids_for_reordering_before_attn "
        "get_thd_partitioned_indices pad_thd_sequences_for_cp reorder_seq_chunks_for_a2a_after_attn "
        "reorder_seq_chunks_for_a2a_before_attn restore_thd_gathered_kv thd_cp_rank_order_to_sequence_order "
        "thd_sequence_order_to_cp_rank_order unrestore_thd_gathered_kv validate_no_load_balance_thd_metadata"),
    "attention.dot_product_attention.dot_product_attention": "FlashAttention",
    "attention.dot_product_attention.flex_attention": "FusedAttentionWithScoreModFunc",
    "attention.dot_product_attention.softmax": (
        "FusedScaleMaskSoftmax scaled_aligned_causal_masked_softmax_backward "
        "scaled_aligned_causal_masked_softmax_forward scaled_masked_softmax_backward "
        "scaled_masked_softmax_forward scaled_softmax_backward scaled_softmax_forward "
        "scaled_upper_triang_masked_softmax_backward scaled_upper_triang_masked_softmax_forward"),
    "attention.dot_product_attention.utils": (
        "AttentionLogging AttentionParams ConvertBSHDtoTHD ConvertTHDtoBSHD FlashAttentionUtils "
        "FusedAttentionParams FusedAttnSpec PackTensors UnpackTensor combine_and_dequantize combine_and_quantize "
        "get_attention_backend get_attention_quantizers get_cu_seqlens get_cu_seqlens_and_indices "
        "get_full_cu_seqlens get_full_mask get_fused_attn_spec get_indices get_padding_mask get_qkv_format "
        "get_qkv_layout get_thd_padding_mask maybe_contiguous mxfp8_quantize_fast_path mxfp8_quantize_only "
        "mxfp8_transpose_swizzle print_quantizers qkv_layout_needs_detection transpose_to_bhsd_htd_pytorch"),
    "attention.fused_mla_q_uproj": "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant rotary_bwd_q_kernel",
    "attention.inference": "InferenceParams KVCacheManager NonPagedKVCacheManager Page PagedKVCacheManager",
    "attention.linear_attention": "GatedDeltaNet2Attention GatedDeltaNetAttention GatedDeltaProductAttention",
    "attention.linear_attention.base": "AlignedTimelineKernelAdapter LinearAttentionBase LinearAttentionKernelAdapter",
    "attention.linear_attention.gdn": "GatedDeltaNetAttention",
    "attention.linear_attention.gdn2": "GatedDeltaNet2Attention",
    "attention.linear_attention.gdp": "GatedDeltaProductAttention",
    "attention.rope": "FusedQKVRoPEFunc FusedRoPEFunc apply_fused_qkv_rotary_pos_emb",
    "constants": "CPLoadBalancingStrategy",
    "cpp_extensions.fused_attn": "FusedAttnBackend fused_attn_bwd fused_attn_fwd",
    "cpp_extensions.gemm": ("get_cublas_workspace get_cublas_workspace_size_bytes "
                            "get_grouped_gemm_setup_workspace_size"),
    "cpu_offload": ("DefaultOffloadSynchronizer ManualOffloadSynchronizer OffloadSynchronizer OffloadableLayerState "
                    "TensorGroup TensorGroupProcessor "
                    ""),
    "cpu_offload_v1": ("AsyncDoubleBufferGroupOffloadHandler CpuOffloadHookWithOffloadHandler "
                       "CpuOffloadSavedTensorHook GroupCommitFunction OffloadHandler SynchronizedGroupOffloadHandler "
                       "is_current_layer_offloaded "
                       ""),
    "cross_entropy": "CrossEntropyFunction parallel_cross_entropy",
    "distributed": ("FullyShardedDataParallel get_symmetric_memory_tensor initialize_affine_weight_gpu "
                    "prepare_te_modules_for_fsdp release_symm_mem_pool symm_mem_alloc symmetric_all_reduce"),
    "distributed_weight": ("DistributedWeight finalize_weight_grads is_distributed_weight "
                           "materialize_weight_for_backward materialize_weight_for_forward"),
    "dynamo": "TensorSpec is_value_opaque_quantizer register_custom_op register_value_opaque_quantizer to_tensor_spec",
    "dynamo.custom_op": "OpaqueValueBundle register_custom_op",
    "dynamo.quantizer_opaque": "is_value_opaque_quantizer register_value_opaque_quantizer",
    "dynamo.tensor_spec": "TensorSpec to_tensor_spec",
    "ep": ("EpBuffer ep_bootstrap ep_combine ep_dispatch ep_finalize ep_prepare is_ep_bootstrapped is_symm_backed "
           "release_symm_mem_pool symm_mem_alloc"),
    "export": "assert_warmed_up is_in_onnx_export_mode onnx_export",
    "graph": ("graph_pool_handle is_graph_capturing make_graphed_callables restore_fp8_tensors save_fp8_tensors "
              "set_capture_end set_capture_start"),
    "jit": ("bgrad_dgelu_fused bgrad_dgelu_fused_ bias_dropout_add bias_dropout_add_fused_inference "
            "bias_dropout_add_fused_inference_ bias_dropout_add_fused_train bias_dropout_add_fused_train_ "
            "bias_gelu_fused bias_gelu_fused_ dgelu_fused_ gelu_fused_ get_bias_dropout_add "
            "l2normalization_backward_fused l2normalization_backward_fused_ l2normalization_fused "
            "l2normalization_fused_ l2normalization_fwd_fused l2normalization_fwd_fused_ lazy_compile "
            "no_torch_dynamo set_jit_fusion_options warmup_jit_bias_dropout_add "
            "warmup_jit_bias_dropout_add_all_dtypes warmup_jit_bias_gelu warmup_jit_bias_gelu_all_dtypes "
            "warmup_jit_l2normalization warmup_jit_l2normalization_all_dtypes"),
    "module": "UserBufferQuantizationMode destroy_ub initialize_ub is_module_grouped_tensor_path_supported",
    "module._common": ("apply_normalization can_reconstruct_wgrad_input_from_original noop_cat "
                       "set_quantizer_usage_for_wgrad_all_gather"),
    "module._split_quantization": "validate_grouped_quantizer_list",
    "module.base": ("UserBufferQuantizationMode destroy_ub fill_userbuffers_buffer_for_all_gather get_ub "
                    "get_ub_is_fp8 initialize_ub is_ub_initialized quantize_weight using_cublasmp_backend"),
    "module.grouped_linear": "is_module_grouped_tensor_path_supported",
    "module.linear": "LinearBwdArgs LinearFwdArgs",
    "newton_schulz": "CusolverMpCtx get_coefficient_iterator get_coefficients newton_schulz newton_schulz_tp",
    "numerics_debug": "debug fp8_tensor_statistics",
    "ops": ("AddExtraInput AllGather AllReduce BasicLinear BasicOperation Bias ClampedSwiGLU ConstantScale Dropout "
            "FusedOperation FusibleOperation GEGLU GELU GLU GroupedLinear Identity L2Normalization LayerNorm Linear "
            "MakeExtraOutput QGEGLU QGELU Quantize RMSNorm ReGLU ReLU ReduceScatter Reshape SReGLU SReLU "
            "ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU Sequential SiLU SiTUGLU SwiGLU "
            "register_backward_fusion register_forward_backward_fusion register_forward_fusion"),
    "ops._common": ("get_accumulate_flag_in_param get_dummy_wgrads_for_params get_fp8_meta_from_fp8_tensor "
                    "get_fused_normalization_quantizer get_main_grad_from_param is_quantized_tensor "
                    "maybe_autocast_dtype maybe_dequantize validate_or_alloc_output view_main_grad_as_grouped_buffer"),
    "ops.basic": ("AddExtraInput AllGather AllReduce BasicLinear Bias ClampedSwiGLU ConstantScale Dropout GEGLU GELU "
                  "GLU GroupedLinear Identity L2Normalization LayerNorm MakeExtraOutput QGEGLU QGELU Quantize "
                  "RMSNorm ReGLU ReLU ReduceScatter Reshape SReGLU SReLU ScaledClampedQGeGLU ScaledSReLU "
                  "ScaledSiTUGLU ScaledSwiGLU ScaledTanhSReLU SiLU SiTUGLU SwiGLU "
                  "is_op_fuser_grouped_tensor_path_supported"),
    "ops.basic.activation": "GEGLU GELU GLU QGEGLU QGELU ReGLU ReLU SReGLU SReLU ScaledSReLU ScaledTanhSReLU SiLU",
    "ops.basic.add_extra_input": "AddExtraInput",
    "ops.basic.all_gather": "AllGather",
    "ops.basic.all_reduce": "AllReduce",
    "ops.basic.basic_linear": "BasicLinear",
    "ops.basic.bias": "Bias",
    "ops.basic.constant_scale": "ConstantScale",
    "ops.basic.dropout": "Dropout",
    "ops.basic.grouped_linear": "GroupedLinear is_op_fuser_grouped_tensor_path_supported",
    "ops.basic.identity": "Identity",
    "ops.basic.l2normalization": "L2Normalization",
    "ops.basic.layer_norm": "LayerNorm",
    "ops.basic.make_extra_output": "MakeExtraOutput",
    "ops.basic.quantize": "Quantize",
    "ops.basic.reduce_scatter": "ReduceScatter",
    "ops.basic.reshape": "Reshape",
    "ops.basic.rmsnorm": "RMSNorm",
    "ops.basic.swiglu": "ClampedSwiGLU ScaledClampedQGeGLU ScaledSiTUGLU ScaledSwiGLU SiTUGLU SwiGLU",
    "ops.fused": ("BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd BackwardLinearScale "
                  "ForwardLinearBiasActivation ForwardLinearBiasAdd ForwardLinearScaleAdd GroupedMLP_CuTeGEMMGLU "
                  "GroupedMLP_CuTeGEMMUnary UserbuffersBackwardLinear UserbuffersForwardLinear "
                  "register_backward_fusion register_forward_fusion"),
    "ops.fused.backward_activation_bias": "BackwardActivationBias",
    "ops.fused.backward_add_rmsnorm": "BackwardAddRMSNorm",
    "ops.fused.backward_linear_add": "BackwardLinearAdd",
    "ops.fused.backward_linear_scale": "BackwardLinearScale",
    "ops.fused.forward_linear_bias_activation": "ForwardLinearBiasActivation",
    "ops.fused.forward_linear_bias_add": "ForwardLinearBiasAdd",
    "ops.fused.forward_linear_scale_add": "ForwardLinearScaleAdd",
    "ops.fused.grouped_mlp": ("GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary fuse_glu_ops fuse_grouped_mlp_ops "
                              "fuse_unary_activation_ops is_glu_activation validate_grouped_mlp_dims"),
    "ops.fused.userbuffers_backward_linear": "UserbuffersBackwardLinear",
    "ops.fused.userbuffers_forward_linear": "UserbuffersForwardLinear",
    "ops.fuser": "OperationFuser register_backward_fusion register_forward_backward_fusion register_forward_fusion",
    "ops.linear": "Linear",
    "ops.op": "BasicOperation FusedOperation FusibleOperation OperationContext",
    "ops.sequential": "Sequential",
    "optimizers": ("FusedSGD multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master "
                   "multi_tensor_adam_fp8 multi_tensor_sgd multi_tensor_unscale_l2norm"),
    "optimizers.fused_adam": "get_fp8_meta",
    "optimizers.fused_sgd": "FusedSGD",
    "optimizers.newton_schulz": ("CusolverMpCtx get_coefficient_iterator get_coefficients newton_schulz "
                                 "newton_schulz_tp"),
    "permutation": ("moe_chunk_sort_backward moe_chunk_sort_forward moe_permute moe_permute_and_pad_with_probs "
                    "moe_permute_index_map_backward moe_permute_index_map_forward moe_permute_mask_map_backward "
                    "moe_permute_mask_map_forward moe_permute_with_probs moe_sort_chunks_by_index "
                    "moe_sort_chunks_by_index_with_probs moe_unpermute moe_unpermute_index_map_backward "
                    "moe_unpermute_index_map_forward moe_unpermute_mask_map_backward_no_probs "
                    "moe_unpermute_mask_map_backward_with_probs moe_unpermute_mask_map_forward"),
    "quantization": "split_and_copy",
    "quantized_tensor": "InnerTensor",
    "router": ("FusedAuxLoss FusedComputeScoresForMoEAuxLoss FusedTopkScoreFunction FusedTopkScoreFunctionQB "
               "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function "
               "mark_qb_bin_bounds_validated"),
    "tensor._quantization_helpers": "safe_quantized_repr",
    "utils": ("all_close assert_viewless_tensor attention_mask_func check_gemm_dims combine_tensors compare_tensors "
              "get_cached_ones_tensor get_sm_count make_weak_ref mark_grouped_tensor print_rank_0 "
              "record_compile_disabled resolve_grouped_linear_single_param_flags safely_set_viewless_tensor_data "
              "validate_ctx_manager validate_rng_states_func warn_compile_eager_fallback warn_if_compile_disabled"),
}.items()}


def __getattr__(name):
    if not any(name in names for names in NAMES.values()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _unsupported(name)
    return globals()[name]
