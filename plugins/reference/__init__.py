"""One fp32 function per operator, straight from the definition: CPU implementation, oracle and documentation."""
