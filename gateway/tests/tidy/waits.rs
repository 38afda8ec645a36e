//! Code by which threads wait for and wake each other: explored by `gateway/interleavings`, or left
//! to a library.

use std::fs;

use super::{CRATES, product_code, rust_files, workspace};

/// What such code is made of.
const PRIMITIVES: [&str; 4] = ["AtomicWaker", "Condvar", "thread::park", "eventfd"];

/// Files that have it and are not explored, and why.
const NOT_EXPLORED: [(&str, &str); 1] = [(
    "gateway/control-plane/src/control/records/service_counts.rs",
    "a Condvar with its Mutex, which the standard library loses no wake of",
)];

#[test]
fn threads_wait_for_each_other_in_explored_files_only() {
    let root = workspace();
    let build = fs::read_to_string(root.join("gateway/interleavings/build.rs")).unwrap();
    let is_explored = |file: &str| {
        let of_crate = file.trim_start_matches("gateway/");
        build.contains(&format!("\"../{of_crate}\""))
    };
    let mut explored = 0;
    let mut others = Vec::new();
    for (folder, _) in CRATES {
        for (path, text) in rust_files(&root.join(folder)) {
            let code = product_code(&text);
            let file = format!("{folder}/{}", path.display());
            if !PRIMITIVES.iter().any(|primitive| code.contains(primitive)) {
                continue;
            }
            if is_explored(&file) {
                explored += 1;
            } else {
                others.push(file);
            }
        }
    }
    assert_eq!(explored, 2, "files that are explored and wait");
    assert_eq!(
        others,
        NOT_EXPLORED.map(|(file, _)| file),
        "files in which threads wait for each other, and those that NOT_EXPLORED lists"
    );
}
