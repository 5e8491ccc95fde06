"""Importers of other programs' step logs; the framework's own form and the paper's are elsewhere."""
