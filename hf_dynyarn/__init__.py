"""Dynamic YaRN for Hugging Face Transformers, with a KV cache that stays exact."""

from .cache import DynamicYaRNCache
from .options import DynamicYaRNConfig
from .patch import PatchHandle, patch_llama, unpatch_llama
from .versions import warn_if_unknown

__version__ = "0.1.0"

__all__ = ["DynamicYaRNCache", "DynamicYaRNConfig", "PatchHandle", "patch_llama", "unpatch_llama"]

warn_if_unknown()
