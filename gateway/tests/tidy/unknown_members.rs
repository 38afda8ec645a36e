//! Members that a type does not know: refused in what people write, and ignored in what programs
//! store or exchange, because the other program may be of a later version.

use std::collections::BTreeSet;

use super::{rust_files, workspace};

/// Types that refuse members that they do not know, and why.
const STRICT: [(&str, &str); 25] = [
    ("PageQuery", WRITTEN),
    ("NewService", WRITTEN),
    ("ServiceChanges", WRITTEN),
    ("AuditLogFilter", WRITTEN),
    ("UsageFilter", WRITTEN),
    ("NotedHeads", WRITTEN),
    ("AgentFilter", WRITTEN),
    ("AgentChanges", WRITTEN),
    ("NewAccount", WRITTEN),
    ("AccountDeletion", WRITTEN),
    ("AccountChanges", WRITTEN),
    ("Rotation", WRITTEN),
    ("AuthorityReplacement", WRITTEN),
    ("AuthorityEnd", WRITTEN),
    ("NewEnrollmentToken", WRITTEN),
    ("NewDomain", WRITTEN),
    ("NewDomainCertificate", WRITTEN),
    ("DomainChanges", WRITTEN),
    ("NewCallerSecret", WRITTEN),
    ("CallerSecretChanges", WRITTEN),
    ("ReplayEdits", WRITTEN),
    ("ReplayField", WRITTEN),
    ("SeriesQuery", WRITTEN),
    // Nodes ask each other with it, too.
    (
        "SearchQuery",
        "a node that ignored a filter would answer with requests that were not asked for",
    ),
    (
        "TokenHeader",
        "RFC 7515 has members that change how a token is verified",
    ),
];

const WRITTEN: &str = "people write it";

#[test]
fn only_what_people_write_refuses_unknown_members() {
    let mut strict = BTreeSet::new();
    let mut ignoring = 0;
    for (path, text) in ["gateway", "agent", "shared", "loadtest"]
        .iter()
        .flat_map(|part| rust_files(&workspace().join(part)))
    {
        for (name, attributes) in types(&text) {
            if !attributes.contains("Deserialize") {
                continue;
            }
            if attributes.contains("deny_unknown_fields") {
                strict.insert(name.to_owned());
            } else {
                ignoring += 1;
            }
            let known = STRICT.iter().any(|(of, _)| *of == name);
            assert!(
                known || !attributes.contains("deny_unknown_fields"),
                "{}: {name} refuses members of a later version; does a person write it? Then add \
                 it to the list",
                path.display()
            );
        }
    }
    let listed: BTreeSet<String> = STRICT.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(listed, strict);
    assert!(ignoring > 80, "{ignoring} other types are found");
}

/// Structs and enums of a file, each with its attributes.
fn types(text: &str) -> Vec<(&str, String)> {
    let mut found = Vec::new();
    let mut attributes = String::new();
    for line in text.lines().map(str::trim) {
        let mut words = line.split([' ', '<', '(', '{', ';']).skip_while(|word| {
            word.starts_with("pub") || ["crate", "in", "super)", "crate)"].contains(word)
        });
        match words.next() {
            Some("struct" | "enum") => {
                let name = words.next().unwrap_or_default();
                found.push((name, std::mem::take(&mut attributes)));
            }
            Some("fn" | "impl" | "let" | "mod" | "use" | "const" | "macro_rules!") => {
                attributes.clear();
            }
            _ => attributes.push_str(line),
        }
    }
    found
}

#[test]
fn types_are_found_with_their_attributes() {
    let text = "/// A.\n#[derive(Deserialize)]\n#[serde(deny_unknown_fields)]\n\
                pub(crate) struct A<T> {\n    x: u8,\n}\n\nimpl A {}\n\
                #[derive(\n    Debug,\n    Deserialize,\n)]\nenum B { C }\nstruct D;\n";
    let found = types(text);
    let names: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["A", "B", "D"]);
    assert!(found[0].1.contains("deny_unknown_fields"));
    assert!(found[1].1.contains("Deserialize") && !found[1].1.contains("deny"));
    assert!(!found[2].1.contains("Deserialize"));
}
