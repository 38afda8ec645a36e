//! The file system of these tests loses what was not synced, and nothing else.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use crate::support::lossy_disk::{Loss, LossyDisk};

fn sync(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_power_cut_loses_names_and_contents_that_were_not_synced() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let path = |name: &str| disk.path().join(name);
    let [whole, unsynced, unnamed] = ["whole", "unsynced", "folder/unnamed"].map(path);
    fs::create_dir(disk.path().join("folder")).unwrap();
    for file in [&whole, &unsynced, &unnamed] {
        fs::write(file, "contents").unwrap();
    }
    sync(&whole);
    sync(&unnamed);
    sync(disk.path());
    fs::write(disk.path().join("later"), "contents").unwrap();
    fs::rename(&whole, disk.path().join("renamed")).unwrap();
    // Programs see all of it before the power cut.
    assert_eq!(
        names(disk.path()),
        ["folder", "later", "renamed", "unsynced"]
    );
    assert_eq!(fs::read_to_string(&unsynced).unwrap(), "contents");

    disk.cut_power(Loss::All);
    assert_eq!(names(disk.path()), ["folder", "unsynced", "whole"]);
    assert_eq!(fs::read_to_string(&whole).unwrap(), "contents");
    assert_eq!(fs::read_to_string(&unsynced).unwrap(), "");
    assert!(names(&disk.path().join("folder")).is_empty());

    // Once more, with a change of each kind of a file that is on the disk.
    let mut file = OpenOptions::new().write(true).open(&whole).unwrap();
    file.write_all_at(b"CON", 0).unwrap();
    file.sync_data().unwrap();
    file.set_len(3).unwrap();
    file.rewind().unwrap();
    file.write_all(b"lost").unwrap();
    fs::remove_file(&unsynced).unwrap();
    drop(file);
    disk.cut_power(Loss::All);
    assert_eq!(fs::read_to_string(&whole).unwrap(), "CONtents");
    assert!(unsynced.exists());
}

#[test]
fn a_power_cut_can_keep_names_and_lose_contents() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let [file, temporary] = ["file", "file.new"].map(|name| disk.path().join(name));
    fs::write(&file, "old").unwrap();
    sync(&file);
    sync(disk.path());
    // A replacement of a file without an `fsync` of the new file.
    fs::write(&temporary, "newer").unwrap();
    fs::rename(&temporary, &file).unwrap();
    disk.cut_power(Loss::Data);
    assert_eq!(names(disk.path()), ["file"]);
    assert_eq!(fs::read(&file).unwrap(), [0; 5]);
}

#[test]
fn a_power_cut_can_tear_a_write_between_sectors() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let file = disk.path().join("file");
    let mut torn = 0;
    for seed in 0..20 {
        fs::write(&file, [b'o'; 4096]).unwrap();
        sync(&file);
        sync(disk.path());
        let opened = OpenOptions::new().write(true).open(&file).unwrap();
        opened.write_all_at(&[b'n'; 4096], 0).unwrap();
        drop(opened);
        disk.cut_power(Loss::AnyPart(fastrand::Rng::with_seed(seed)));
        let found = fs::read(&file).unwrap();
        assert!(
            found
                .chunks(512)
                .all(|sector| sector.iter().all(|byte| *byte == sector[0]))
        );
        torn += usize::from(found.contains(&b'o') && found.contains(&b'n'));
    }
    assert!((1..20).contains(&torn), "{torn} of 20 are torn");
}

#[test]
fn files_behave_as_on_other_file_systems() {
    let Some(disk) = LossyDisk::mount() else {
        return;
    };
    let [file, other] = ["file", "other"].map(|name| disk.path().join(name));
    fs::write(&file, "contents").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    fs::hard_link(&file, &other).unwrap();
    assert!(fs::hard_link(&file, &other).is_err());
    assert!(fs::create_dir(&other).is_err());
    // An open file without a name can still be read.
    let opened = File::open(&file).unwrap();
    fs::remove_file(&file).unwrap();
    fs::remove_file(&other).unwrap();
    let mut text = [0; 8];
    opened.read_exact_at(&mut text, 0).unwrap();
    assert_eq!(&text, b"contents");
    std::os::unix::fs::symlink("target", &file).unwrap();
    assert_eq!(fs::read_link(&file).unwrap(), Path::new("target"));
    let folder = disk.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    assert!(fs::remove_dir(&folder).is_err());
    fs::rename(folder.join("file"), disk.path().join("moved")).unwrap();
    fs::remove_dir(&folder).unwrap();
    assert_eq!(names(disk.path()), ["file", "moved"]);
}
