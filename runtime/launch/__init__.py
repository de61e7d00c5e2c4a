"""Starting what serves: tritonserver, its model repository, the engine, the doctor, the demo."""
