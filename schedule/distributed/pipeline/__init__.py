"""Pipeline parallelism for scheduled models."""

from schedule.distributed.pipeline.pipeline import Output, Pipeline, PipelinedModel, PipelineRanks

__all__ = ["Output", "Pipeline", "PipelineRanks", "PipelinedModel"]
