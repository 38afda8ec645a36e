//! Documents on disk or standard input: one file, or all of a folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gw_shared::files::unreadable;
use gw_shared::text::escaped;

use super::object::{ObjectId, ObjectKind};
use super::parse::{Declared, Mistake, parse};

/// Largest document, in bytes.
const DOCUMENT_MAX: u64 = 64 << 20;
/// Most documents that are read together.
const DOCUMENTS_MAX: usize = 10_000;
/// Most objects of all documents together.
const OBJECTS_MAX: usize = 1_000_000;
/// Folders within folders that are read.
const DEPTH_MAX: usize = 16;

/// Everything that documents declare.
#[derive(Debug, Default)]
pub(super) struct Declarations {
    /// In the order of creation.
    pub(super) objects: Vec<Declared>,
    /// Labels of documents, and of objects that have one of their own.
    pub(super) managers: std::collections::BTreeSet<String>,
}

/// Reads the documents at `paths`; `-` is standard input. `managed_by` is the label of documents
/// that have none.
pub(super) fn read(
    paths: &[PathBuf],
    managed_by: Option<&str>,
    mistakes: &mut Vec<Mistake>,
) -> Declarations {
    let mut files = Vec::new();
    for path in paths {
        if let Err(message) = find(path, 0, &mut files) {
            report(path, &message, mistakes);
        }
    }
    let mut found = Declarations::default();
    found.managers.extend(managed_by.map(str::to_owned));
    for path in files {
        let text = match text_of(&path) {
            Ok(text) => text,
            Err(message) => {
                report(&path, &message, mistakes);
                continue;
            }
        };
        let document = parse(&shown(&path), &text, managed_by, mistakes);
        found.managers.extend(document.managed_by);
        found.objects.extend(document.objects);
        if found.objects.len() > OBJECTS_MAX {
            let message = format!(
                "more than {OBJECTS_MAX} objects; apply the documents in parts, such as one \
                 account at a time"
            );
            report(&path, &message, mistakes);
            break;
        }
    }
    let labels = found.objects.iter();
    let labels: Vec<String> = labels
        .filter_map(|object| object.managed_by.clone())
        .collect();
    found.managers.extend(labels);
    found
        .objects
        .sort_by(|one, other| (&one.id, &one.place).cmp(&(&other.id, &other.place)));
    for pair in found.objects.windows(2) {
        if pair[0].id == pair[1].id {
            mistakes.push(Mistake {
                place: Some(pair[1].place.clone()),
                message: declared_twice(&pair[0], &pair[1].id),
            });
        }
    }
    report_domains_of_several_accounts(&found, mistakes);
    found
}

/// Reports domains that several accounts declare: one of them can have it.
fn report_domains_of_several_accounts(found: &Declarations, mistakes: &mut Vec<Mistake>) {
    let mut domains: BTreeMap<&str, &Declared> = BTreeMap::new();
    let declared = found.objects.iter();
    for object in declared.filter(|object| object.id.kind == ObjectKind::Domain) {
        let first = *domains.entry(&object.id.name).or_insert(object);
        if first.id != object.id {
            let place = &first.place;
            mistakes.push(Mistake {
                place: Some(object.place.clone()),
                message: format!(
                    "{} is also declared as {}, at {}:{}; leave it to one account",
                    object.id, first.id, place.file, place.line
                ),
            });
        }
    }
}

pub(super) fn declared_twice(first: &Declared, id: &ObjectId) -> String {
    let place = &first.place;
    format!(
        "{id} is there twice, first at {}:{}; put its keys together, or remove one",
        place.file, place.line
    )
}

fn report(path: &Path, message: &str, mistakes: &mut Vec<Mistake>) {
    mistakes.push(Mistake {
        place: None,
        message: format!("{}: {message}", shown(path)),
    });
}

/// The path in messages and in the audit log.
fn shown(path: &Path) -> Arc<str> {
    match path.to_str() {
        Some("-") => "standard input".into(),
        _ => escaped(&path.to_string_lossy()).into(),
    }
}

/// Adds the documents at `path`: the file itself, or the `.toml` files of the folder and of folders
/// in it, in the order of their names. Hidden files are left out.
fn find(path: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let cannot = |error: io::Error| unreadable(path, &error);
    if path.as_os_str() == "-" || !fs::metadata(path).map_err(cannot)?.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    if depth > DEPTH_MAX {
        return Err(format!("folders are more than {DEPTH_MAX} deep"));
    }
    let before = files.len();
    let entries = fs::read_dir(path).map_err(cannot)?;
    let entries = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut entries: Vec<PathBuf> = entries.collect::<Result<_, _>>().map_err(cannot)?;
    entries.sort();
    for entry in entries {
        let is_hidden = entry
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_hidden {
            continue;
        }
        if entry.is_dir() {
            find(&entry, depth + 1, files)?;
        } else if entry
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            files.push(entry);
        }
        if files.len() > DOCUMENTS_MAX {
            return Err(format!("more than {DOCUMENTS_MAX} files"));
        }
    }
    if depth == 0 && files.len() == before {
        return Err(
            "the folder has no .toml file; `gw-gateway export` writes what a gateway has"
                .to_owned(),
        );
    }
    Ok(())
}

fn text_of(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = if path.as_os_str() == "-" {
        io::stdin()
            .lock()
            .take(DOCUMENT_MAX + 1)
            .read_to_end(&mut bytes)
    } else {
        File::open(path).and_then(|file| file.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes))
    };
    let length = read.map_err(|error| unreadable(path, &error))?;
    if length as u64 > DOCUMENT_MAX {
        let mebibytes = DOCUMENT_MAX >> 20;
        return Err(format!(
            "larger than {mebibytes} MiB; divide it into several files"
        ));
    }
    String::from_utf8(bytes).map_err(|_| "is not UTF-8 text".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_folder(files: &[(&str, &str)]) -> (Declarations, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let mut mistakes = Vec::new();
        let found = read(&[folder.path().to_owned()], None, &mut mistakes);
        let prefix = format!("{}/", folder.path().display());
        let mistakes = mistakes.iter();
        let mistakes = mistakes.map(|mistake| mistake.to_string().replace(&prefix, ""));
        (found, mistakes.collect())
    }

    #[test]
    fn a_folder_is_read_with_its_folders_in_the_order_of_creation() {
        let (found, mistakes) = read_folder(&[
            (
                "a.toml",
                "managed_by = \"git\"\n[[service]]\naccount = \"acme\"\nid = \"api\"\n",
            ),
            (
                "b/c.toml",
                "[[account]]\nid = \"acme\"\nmanaged_by = \"ops\"\n",
            ),
            ("notes.md", "not a document"),
            (".git/config.toml", "not a document"),
            ("b/.hidden.toml", "not a document"),
        ]);
        assert_eq!(mistakes, [""; 0]);
        let objects: Vec<String> = found.objects.iter().map(|it| it.id.to_string()).collect();
        assert_eq!(objects, ["account acme", "service acme/api"]);
        assert_eq!(Vec::from_iter(found.managers), ["git", "ops"]);
    }

    #[test]
    fn mistakes_of_all_files_are_reported() {
        let account = "[[account]]\nid = \"acme\"\n";
        let (_, mistakes) = read_folder(&[
            ("a.toml", account),
            ("b.toml", &format!("\n{account}")),
            ("c.toml", "[[account]]\nid = \"A\"\n"),
            ("d.toml", "colour = 1\n"),
        ]);
        assert_eq!(
            mistakes,
            [
                "c.toml:2: account: id: \"A\" is not an account id: 3 to 15 characters of a-z and \
                 0-9",
                "d.toml:1: colour: no such key or kind of object; the kinds are account, service, \
                 domain, credential, key, agent",
                "b.toml:2: account acme is there twice, first at a.toml:1; put its keys together, \
                 or remove one",
            ]
        );
        let (_, mistakes) = read_folder(&[("notes.md", "")]);
        assert!(
            mistakes[0].contains("the folder has no .toml file; "),
            "{mistakes:?}"
        );
    }
}
