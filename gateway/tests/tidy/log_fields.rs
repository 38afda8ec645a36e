//! Fields of log lines. A line in JSON has each name once: those of the format are not names of
//! fields.

use super::{CRATES, product_code, rust_files, workspace};

/// Names of the format of the log in JSON.
const OF_THE_FORMAT: [&str; 4] = ["timestamp", "level", "target", "message"];
const MACROS: [&str; 5] = [
    "tracing::trace!(",
    "tracing::debug!(",
    "tracing::info!(",
    "tracing::warn!(",
    "tracing::error!(",
];

/// The arguments of the macros that log, without those within brackets.
fn arguments(code: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (at, name) in MACROS.iter().flat_map(|name| code.match_indices(name)) {
        let mut argument = String::new();
        let (mut depth, mut is_text, mut before) = (0_usize, false, ' ');
        for character in code[at + name.len()..].chars() {
            let is_quote = character == '"' && before != '\\';
            is_text ^= is_quote;
            match character {
                _ if is_text || is_quote => {}
                '(' | '[' | '{' => depth += 1,
                ')' if depth == 0 => break,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                ',' if depth == 0 => all.push(std::mem::take(&mut argument)),
                _ if depth == 0 => argument.push(character),
                _ => {}
            }
            before = character;
        }
        all.push(argument);
    }
    all
}

/// The name of a field, of an argument such as `%error` or `node = 1`.
fn field(argument: &str) -> &str {
    let name = argument.split('=').next().unwrap_or_default().trim();
    name.trim_start_matches(['%', '?'])
}

#[test]
fn fields_are_found_in_every_form() {
    let code = concat!(
        r#"tracing::info!(%error, target = entry.target, at = f(level, 1), "a, level"); "#,
        r#"tracing::warn!(level, "b");"#
    );
    let arguments = arguments(code);
    let fields: Vec<_> = arguments.iter().map(|it| field(it)).collect();
    assert_eq!(fields, ["error", "target", "at", "", "level", ""]);
}

#[test]
fn a_log_line_has_each_name_once() {
    let mut found = Vec::new();
    let root = workspace();
    let of_crates = CRATES.map(|(folder, _)| rust_files(&root.join(folder)));
    for (path, text) in of_crates.into_iter().flatten() {
        let arguments = arguments(&product_code(&text));
        let fields = arguments.iter().map(|it| field(it));
        let repeated = fields.filter(|field| OF_THE_FORMAT.contains(field));
        found.extend(repeated.map(|field| format!("{}: {field}", path.display())));
    }
    assert!(
        found.is_empty(),
        "fields with a name of the format: {found:?}; use another name"
    );
}
