"""Weights of published Llama models, in and out, for `coat_jax.models.llama`."""

from coat_jax.models.pretrained.gguf_file import load_gguf as load_gguf
from coat_jax.models.pretrained.gguf_file import save_gguf as save_gguf
from coat_jax.models.pretrained.safetensors_file import (
    load_safetensors as load_safetensors,
)
from coat_jax.models.pretrained.safetensors_file import (
    save_safetensors as save_safetensors,
)
from coat_jax.models.pretrained.tensors import from_huggingface as from_huggingface
from coat_jax.models.pretrained.tensors import to_huggingface as to_huggingface
