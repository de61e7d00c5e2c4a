"""The forward pass as a composition of operators."""

from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.collectives import Group, Groups, SingleRank
from gptoss_trt.runtime.model.graphed import GraphedModel
from gptoss_trt.runtime.model.loader import LoadError
from gptoss_trt.runtime.model.model import GptOssModel, load_model

__all__ = ["GptOssModel", "GraphedModel", "Group", "Groups", "LoadError", "SingleRank", "StepBatch", "load_model"]
