"""`smp.patches`: a folder of the import contract."""
