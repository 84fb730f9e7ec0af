"""Distributed modules: layers whose weights and work are split over a tensor group."""

from lightning_smp.nn import huggingface
from lightning_smp.nn.attention import DistributedAttentionLayer
from lightning_smp.nn.embedding import DistributedEmbedding
from lightning_smp.nn.flash_attention import FlashAttentionLayer
from lightning_smp.nn.layer_norm import DistributedLayerNorm, FusedLayerNorm
from lightning_smp.nn.linear import DistributedLinear
from lightning_smp.nn.lm_head import DistributedTransformerLMHead
from lightning_smp.nn.output_layer import DistributedTransformerOutputLayer
from lightning_smp.nn.transformer import DistributedTransformer, DistributedTransformerLayer
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]
