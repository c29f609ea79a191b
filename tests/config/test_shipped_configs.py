"""The configs that come with jaxpar: the published model, and the devices that they promise."""

import math

import pytest

from jaxpar.config import command_line, config_file, replace
from jaxpar.config.validate import check, resolve
from jaxpar.model.flops import num_params

CONFIGS = config_file.known_configs().split(", ")

#: Parameters as published, and the numbers of devices that the config's first line promises.
SHIPPED = {
    "llama_1b": (1_235_814_400, [1, 8]),
    "llama_100m": (100_092_672, [1, 8]),
    "llama_1b_chat": (1_235_814_400, [1, 8]),
    "llama_1b_lora_chat": (1_235_814_400, [1, 8]),
    "llama_1b_dpo": (1_235_814_400, [1, 8]),
    "llama_1b_long/8k": (1_235_814_400, [1, 8]),
    "llama_1b_long/32k": (1_235_814_400, [2, 8]),
    "llama_1b_long/128k": (1_235_814_400, [8, 64]),
    "llama3_8b": (8_030_261_248, [8, 16]),
    "llama3_70b": (70_553_706_496, [64, 128, 512]),
    "llama3_405b": (405_853_388_800, [384]),
    "mixtral_8x7b": (46_702_792_704, [8, 16]),
    "olmoe_1b_7b": (6_919_161_856, [1, 8]),
    "qwen3_30b_a3b": (30_532_122_624, [8, 16]),
    "gpt_oss_20b": (20_914_757_184, [4, 8]),
    "deepseek_v2_lite": (15_706_484_224, [4, 8]),
    "llama4_scout": (107_769_861_120, [16, 32]),
    "moonlight_16b_a3b": (15_960_110_208, [4, 8]),
    "deepseek_v3": (671_026_419_200, [128, 256]),
    "kimi_k2": (1_026_408_232_448, [256]),
    "gpt_oss_120b": (116_829_156_672, [16, 32]),
    "llama3_3_70b": (70_553_706_496, [64, 512]),
    "phi_4": (14_659_507_200, [8, 16]),
    "phi_4_mini": (3_836_021_760, [1, 8]),
    "gpt2_124m": (124_475_904, [1, 8]),
    "gpt3_175b": (174_615_846_912, [128, 512, 1024]),
    "granite_4_1_3b": (3_402_836_480, [1, 8]),
    "ministral_3_8b": (8_489_553_920, [8, 16]),
    "gemma_2/2b": (2_614_341_888, [1, 8]),
    "gemma_2/9b": (9_241_705_984, [8, 16]),
    "gemma_2/27b": (27_227_128_320, [8, 16]),
    "gemma_3/270m": (268_098_176, [1, 8]),
    "gemma_3/1b": (999_885_952, [1, 8]),
    "gemma_3/4b": (3_880_263_168, [8, 16]),
    "gemma_3/12b": (11_766_034_176, [8, 16]),
    "gemma_3/27b": (27_009_346_304, [8, 16]),
    "gemma_4/31b": (30_697_345_340, [8, 16]),
    "qwen3_next_80b_a3b": (79_674_391_296, [16, 32]),
    "kimi_linear_48b_a3b": (49_122_681_728, [8, 16, 64]),
    "nemotron_h_8b": (8_100_852_736, [2, 4, 8]),
    "nemotron_3_nano": (31_577_940_288, [8, 16]),
    "olmo_hybrid_7b": (7_430_870_688, [2, 8]),
    "quickstart_hybrid": (897_312, [1, 2, 4, 8, 16]),
    "quickstart": (822_400, [1, 2, 4, 8, 16]),
    "extending": (822_400, [1, 2, 4, 8, 16]),
    "sigmoid_attention": (857_216, [1, 2, 4]),
    "source_weights": (1_235_814_400, [1, 8]),
    "finetune": (3_213_568, [1, 8]),
    "llama": (158_622_720, [1, 8]),  # with 32,000 tokens
    "quickstart_moe": (2_596_000, [1, 2, 4, 8, 16]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_is_the_published_model_and_fits_its_devices(name):
    cfg = command_line.load_config(name)
    if not cfg.model.vocab_size:  # that of the data
        cfg = replace(cfg, **{"model.vocab_size": 32_000})
    parameters, devices = SHIPPED[name]
    assert num_params(cfg.model) == parameters
    check(cfg)
    for number in devices:
        p = resolve(cfg, number).parallel
        axes = (p.pipeline, p.replica, p.data, p.expert, p.sequence, p.tensor)
        assert math.prod(axes) == number
