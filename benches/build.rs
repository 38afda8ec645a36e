//! Links the benchmarks with GNU ld: valgrind 3.19 finds no functions in what LLD links.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-benches=-fuse-ld=bfd");
}
