"""The patch series: what it is (`series`), how it is edited (`tree`), tested (`check`) and installed (`install`)."""
