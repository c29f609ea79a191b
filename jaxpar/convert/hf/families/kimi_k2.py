"""Kimi K2: the classes of DeepSeek-V3 under a type of its own."""

import dataclasses

from jaxpar.convert.hf.families.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
