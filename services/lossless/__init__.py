"""`specroll lossless`: the statistical proof that speculation does not change what is sampled."""
