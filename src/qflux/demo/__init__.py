"""The offline demo: scenes painted in code, a small trained model, an edit it learns."""
