"""Imports and exports published models (`python -m jaxpar.convert`), and loads them onto a mesh.

hf/families       a table for each family         hf/tensor_layout  the notation of the tables
hf/config         config.json to ModelConfig      hf/keys           groups of its keys
hf/folder         finds and checks tensors        run_arrays        a checkpoint, box by box
hf/importing      from-hf                         hf/exporting      to-hf
peft/importing    from-peft                       peft/exporting    to-peft
megatron/importing from-megatron                 megatron/checkpoint   torch_dist
megatron/torch_zip    pickles, not run           torch_file        to-torch
torch_names       names in its files             torch_model       the model in plain PyTorch
selfcheck         compares logits
"""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "model",
    "step",
    "data",
    "checkpoint",
    "stores",
)
