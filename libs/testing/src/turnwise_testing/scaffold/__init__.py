"""`turnwise new`: writes plugins from templates."""
