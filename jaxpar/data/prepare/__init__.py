"""Tokenize documents and chats."""
