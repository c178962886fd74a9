"""Attribution: what gradients say of causes, and exact runs of what they say."""
