//! Tables with aligned columns.

use std::io::{self, Write};

use gw_shared::text::escaped;

const GAP: &str = "  ";

/// Writes rows with each column as wide as its widest cell. Nothing is cut off. Hidden characters
/// are escaped, because cells may hold data from the network.
pub(crate) fn write(out: &mut impl Write, rows: &[Vec<String>]) -> io::Result<()> {
    let rows: Vec<Vec<_>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| escaped(cell)).collect())
        .collect();
    let column_count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..column_count)
        .map(|column| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    for row in &rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        writeln!(out, "{}", cells.join(GAP).trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(rows: &[&[&str]]) -> String {
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.iter().map(ToString::to_string).collect())
            .collect();
        let mut out = Vec::new();
        write(&mut out, &rows).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_align_by_characters_without_trailing_spaces() {
        let rows: [&[&str]; 3] = [
            &["NAME", "SERVICES"],
            &["caf\u{e9}-long", "api, b"],
            &["-", ""],
        ];
        assert_eq!(
            written(&rows),
            "NAME       SERVICES\ncaf\u{e9}-long  api, b\n-\n"
        );
        assert_eq!(written(&[]), "");
    }

    #[test]
    fn control_characters_in_cells_are_escaped() {
        assert_eq!(
            written(&[&["/\u{9b}2J\n\u{202e}a"]]),
            "/\\u{9b}2J\\u{a}\\u{202e}a\n"
        );
    }
}
