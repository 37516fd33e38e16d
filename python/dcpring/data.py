"""Elastic data pipelines: the public path of what ``dcpring.resume.data`` defines."""

from dcpring.resume.data import (
    ElasticDataset,
    ElasticLoader,
    ElasticSampler,
    Permutation,
    distributed_order,
    torchdata_batches,
)

__all__ = ["ElasticDataset", "ElasticLoader", "ElasticSampler", "Permutation", "distributed_order", "torchdata_batches"]
