"""Published models in and out: `python -m jaxpar.convert`; a folder straight onto a mesh.

layout        the language of the tables          families      a table for each family
hf_config     config.json: our fields             layer_keys    config.json: RoPE and windows
hf_folder     tensors, found and checked          run_arrays    a checkpoint, box by box
importing     from-hf                             exporting     to-hf
mesh_load     a published folder onto a mesh      torch_file    to-torch
selfcheck     the same logits?
"""

MAY_IMPORT = ("config", "runtime", "sharding", "model", "step", "data", "checkpoint")
