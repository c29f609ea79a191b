"""The published families: a file for each, used for both import and export.

A `Family` maps addresses of components to keys of config.json, and weights to tensors. To add one,
add its file and a line below. To support a new feature, first add its field to a component.
"""

from jaxpar.convert.hf.families.deepseek_v2 import DEEPSEEK_V2
from jaxpar.convert.hf.families.deepseek_v3 import DEEPSEEK_V3
from jaxpar.convert.hf.families.dots1 import DOTS1
from jaxpar.convert.hf.families.gemma2 import GEMMA2
from jaxpar.convert.hf.families.gemma3 import GEMMA3
from jaxpar.convert.hf.families.gemma4 import GEMMA4
from jaxpar.convert.hf.families.glm4_moe import GLM4_MOE
from jaxpar.convert.hf.families.gpt2 import GPT2
from jaxpar.convert.hf.families.gpt_neox import GPT_NEOX
from jaxpar.convert.hf.families.gpt_oss import GPT_OSS
from jaxpar.convert.hf.families.granite import GRANITE
from jaxpar.convert.hf.families.helium import HELIUM
from jaxpar.convert.hf.families.kimi_k2 import KIMI_K2
from jaxpar.convert.hf.families.kimi_linear import KIMI_LINEAR
from jaxpar.convert.hf.families.llama import LLAMA
from jaxpar.convert.hf.families.llama4 import LLAMA4
from jaxpar.convert.hf.families.ministral3 import MINISTRAL3
from jaxpar.convert.hf.families.mistral import MISTRAL
from jaxpar.convert.hf.families.mixtral import MIXTRAL
from jaxpar.convert.hf.families.nemotron_h import NEMOTRON_H
from jaxpar.convert.hf.families.olmo2 import OLMO2
from jaxpar.convert.hf.families.olmo3 import OLMO3
from jaxpar.convert.hf.families.olmo_hybrid import OLMO_HYBRID
from jaxpar.convert.hf.families.olmoe import OLMOE
from jaxpar.convert.hf.families.phi3 import PHI3
from jaxpar.convert.hf.families.qwen2 import QWEN2
from jaxpar.convert.hf.families.qwen3 import QWEN3
from jaxpar.convert.hf.families.qwen3_5 import QWEN3_5
from jaxpar.convert.hf.families.qwen3_moe import QWEN3_MOE
from jaxpar.convert.hf.families.qwen3_next import QWEN3_NEXT
from jaxpar.convert.hf.families.smollm3 import SMOLLM3
from jaxpar.convert.hf.families.starcoder2 import STARCODER2

#: The first family in this order that can express a model is its default.
FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    DOTS1,
    GLM4_MOE,
    GEMMA3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    QWEN3_NEXT,
    QWEN3_5,
    NEMOTRON_H,
    KIMI_LINEAR,
    OLMO2,
    OLMO3,
    OLMO_HYBRID,
    SMOLLM3,
    HELIUM,
    GPT_OSS,
    PHI3,
    GRANITE,
    GEMMA2,
    MINISTRAL3,
    LLAMA4,
    GPT2,
    GPT_NEOX,
    STARCODER2,
    GEMMA4,
)
