"""A scheduled model as the stages of a pipeline."""

from schedule.distributed.pipeline.pipeline import Output, Pipeline, PipelinedModel, PipelineRanks

__all__ = ["Output", "Pipeline", "PipelineRanks", "PipelinedModel"]
