// A target has to have a source, and this one is there for its precompiled headers.
int main() {}
