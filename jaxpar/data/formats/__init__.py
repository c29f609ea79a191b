"""Token formats on disk: jaxpar's, Megatron's, nanoGPT's and llm.c's."""
