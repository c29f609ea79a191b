"""Imports and exports published models (`python -m jaxpar.convert`), and loads them onto a mesh.

hf/families       a file for each family          hf/tensor_layout  where a tensor has a parameter
hf/config         config.json to a composition    hf/keys           groups of its keys
hf/composed       layers from keys, and back      hf/names          names and layouts of tensors
hf/folder         finds and checks tensors        run_arrays        a checkpoint, box by box
hf/importing      from-hf                         hf/exporting      to-hf
peft/importing    from-peft                       peft/exporting    to-peft
megatron/importing from-megatron                 megatron/checkpoint   torch_dist
megatron/torch_zip    pickles, not run           torch_file        to-torch
torch_model       the model in plain PyTorch     selfcheck         compares logits
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
