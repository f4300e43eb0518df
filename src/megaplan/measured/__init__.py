"""What kernels of megarun reach on devices where steps were profiled: constants beside their measurement, one file a device."""
